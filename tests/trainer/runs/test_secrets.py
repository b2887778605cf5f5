import pytest

from rolltap.trainer.runs.secrets import REDACTED, Secrets

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----"
FOUND = {
    "private key": KEY,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "API key (sk-)": "sk-proj-abcdefghij0123456789",
    "GitHub token": "ghp_" + "a1B2" * 9,
    "Hugging Face token": "hf_" + "abcde" * 7,
    "AWS key id": "AKIA" + "ABCD1234" * 2,
    "Slack token": "xoxb-1234567890-abcdef",
    "GitLab token": "glpat-" + "x" * 20,
    "Google API key": "AIza" + "a" * 35,
    "bearer token": "Authorization: Bearer abcdef0123456789",
    "password in a URL": "user:hunter22@",
}
HARMLESS = [
    "the task-force sk-short and hf_transfer, ghp_x",
    "https://example.com:8080/a@b and git@github.com:me/you.git",
    "-----BEGIN PUBLIC KEY-----",
    "Authorization: Bearer $TOKEN",
    "def task_sketch(risk-free): AKIA",
]


@pytest.mark.parametrize("kind", FOUND)
def test_a_known_form_is_found_wherever_it_is(kind):
    secret, secrets = FOUND[kind], Secrets()
    before, after = ("see https://", "example.com/x") if "URL" in kind else ("KEY=", " is set")
    text = f"{before}{secret}{after}"
    assert [(found, text[start:end]) for found, start, end in secrets.find(text)] == [(kind, secret)]
    assert secrets.redact(text) == f"{before}{REDACTED}{after}"


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_left_as_it_is(text):
    assert Secrets().redact(text) == text


def test_given_texts_are_found_as_they_are_and_within_json():
    secrets = Secrets(['say "hi"', "acme"])
    assert secrets.redact('acme: say "hi", {"a": "say \\"hi\\""}') == f'{REDACTED}: {REDACTED}, {{"a": "{REDACTED}"}}'
    assert Secrets([""]).redact("all of it") == "all of it"


def test_values_are_redacted_at_every_depth_and_names_of_the_format_stay():
    value = {"reply": [{FOUND["GitHub token"]: FOUND["JWT"]}, 1, None]}
    assert Secrets(["reply"]).redact_values(value) == {"reply": [{REDACTED: REDACTED}, 1, None]}


def test_the_kinds_of_several_texts_are_named_once():
    assert Secrets().kinds([FOUND["JWT"], None, f"again {FOUND['JWT']}"]) == {"JWT"}
