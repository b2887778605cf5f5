"""The address at which a service listens."""

from tests.trainer.service.served import program, serving


def test_a_service_on_ipv6_prints_a_url_that_a_client_can_use(scripted, tokenizer_folder, tmp_path):
    harness = program(tmp_path)
    run = tmp_path / "run"
    with serving(run, scripted.url, tokenizer_folder, harness, "--host", "::1") as service:
        assert service.url.startswith("http://[::1]:")
        assert service.client.get("/service").status_code == 200
    assert "is reached from other machines" not in service.said
