import json
from itertools import pairwise
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.trainer.runs.secrets import REDACTED, Secrets

KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE"
    " KEY-----"
)
RANDOM = "k3Jx9QvT2mWz7LpB4rYd8NfH6sCg1VaE"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
TOKENS = {
    "of OpenAI": "sk-proj-" + RANDOM,
    "of Anthropic": "sk-ant-api03-" + RANDOM,
    "of OpenRouter": "sk-or-v1-" + RANDOM,
    "of Hugging Face": "hf_" + RANDOM + "ab",
    "of Groq": "gsk_" + RANDOM,
    "of xAI": "xai-" + RANDOM,
    "of NVIDIA": "nvapi-" + RANDOM,
    "of Replicate": "r8_" + RANDOM,
    "of Perplexity": "pplx-" + RANDOM,
    "of Google": "AIza" + RANDOM + "abc",
    "of Google, OAuth": "ya29." + RANDOM,
    "of GitHub": "ghp_" + "a1B2" * 9,
    "of GitHub, fine-grained": "github_pat_" + RANDOM,
    "of GitLab": "glpat-" + "x9" * 10,
    "of AWS": "AKIA" + "ABCD1234" * 2,
    "of Slack": "xoxb-123456789012-" + RANDOM,
    "of npm": "npm_" + RANDOM + "ab4D",
    "of PyPI": "pypi-AgEIcHlwaS5vcmc" + RANDOM * 3,
    "of Stripe": "sk_live_" + RANDOM[:24],
    "of SendGrid": "SG." + RANDOM[:22] + "." + RANDOM + RANDOM[:11],
    "of Twilio": "SK" + "0a1b2c3d" * 4,
    "of Telegram": "123456789:" + RANDOM + "abc",
    "of Docker": "dckr_pat_" + RANDOM,
    "of DigitalOcean": "dop_v1_" + "0a1b2c3d" * 8,
    "of Databricks": "dapi" + "0a1b2c3d" * 4,
    "of Vault": "hvs." + RANDOM,
    "of Linear": "lin_api_" + RANDOM,
    "of Shopify": "shpat_" + "0a1b2c3d" * 4,
    "of Discord": "M" + "a1B2c3" * 4 + ".XaBcDe." + "a1B2c3D4e5" * 2 + "a1B2c3D",
    "a JWT": JWT,
}
"""Tokens that say by themselves what they are."""
ASSIGNED = {
    "a shell's variable": "export API_KEY={}",
    "a .env file": "SECRET_TOKEN={}\n",
    "quotes": "client_secret = '{}'",
    "YAML": "  password: {}\n",
    "JSON": '{{"access_token": "{}"}}',
    "a kubeconfig's token": "users:\n- name: me\n  user:\n    token: {}\n",
    "a kubeconfig's key": "    client-key-data: {}\n",
    "AWS credentials": "aws_secret_access_key = {}",
    "an Azure connection string": "AccountName=x;AccountKey={}==;EndpointSuffix=core.windows.net",
    "an option": "curl --api-key {} https://example.com",
    "a header": "x-api-key: {}",
    "a bearer": "Authorization: Bearer {}",
    "basic": "authorization: Basic {}",
    "a bearer in code": "headers={{'Authorization': 'Bearer {}'}}",
    "a cookie": "Cookie: theme=dark; session={}",
    "a cookie that is set": "Set-Cookie: sid={}; HttpOnly",
    ".netrc": "machine example.com login me password {}",
    ".netrc on lines": "machine example.com\n  login me\n  password {}\n",
    "a database": "postgresql://me:{}@db.example/app",
    "a remote": "https://oauth2:{}@git.example/x.git",
    "a URL's query": "https://example.com/x?access_token={}&a=b",
    ".pypirc": "username = __token__\npassword = {}",
    ".npmrc": "//registry.example/:_authToken={}",
}
"""Places of a secret that is random characters only."""
HARMLESS = [
    (
        "hf_download_of_qwen3_with_retries and npm_config_legacy_peer_deps_2,"
        " sk-learn-estimator-checks-of-all"
    ),
    "the task-force sk-short and hf_transfer, ghp_x",
    "https://example.com:8080/a@b and git@github.com:me/you.git",
    "-----BEGIN PUBLIC KEY-----",
    "Authorization: Bearer $TOKEN",
    "def task_sketch(risk-free): AKIA",
    "token = tokenizer.decode(ids[0])",
    "api_key = os.environ['API_KEY_2']",
    "password: must have 8 characters and a digit",
    "max_tokens=16384 and token_count: 128000",
    "secret = get_secret_value_2(name)",
    "API_KEY=${API_KEY_2} or API_KEY=<your-api-key-1>",
    '"prompt_cache_key": "0199a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"',
    '{"token_ids": [151644, 872], "tool_call_id": "call_9f8e7d6c5b4a"}',
    "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "100%2Dof it: 50%25 \\u00e9t\\u00e9 \\n",
]
WRITTEN = {
    "as it is": str,
    "within JSON": json.dumps,
    "within JSON within JSON": lambda text: json.dumps(json.dumps({"a": text})),
    "percent-encoded": lambda text: quote(text, safe=""),
    "as JSON's code points": lambda text: "".join(f"\\u{ord(character):04x}" for character in text),
}
"""Ways in which a recorded text may have another one."""
BROKEN = {
    "over lines": "\n",
    "over indented lines": "\n    ",
    "over lines within JSON": "\\n",
    "by a colour": "\x1b[1;31m",
    "by a colour within JSON": "\\u001b[0m",
    "by a character without width": "\u200b",
}


def kinds(text):
    return [kind for kind, _, _ in Secrets().find(text)]


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("written", WRITTEN)
def test_a_token_is_found_wherever_it_is(name, written):
    text = WRITTEN[written](f"we have {TOKENS[name]} in it")
    assert len(kinds(text)) == 1
    redacted = Secrets().redact(text)
    assert REDACTED in redacted
    assert TOKENS[name][-12:] not in redacted
    assert "have" in redacted or "u00" in redacted


@pytest.mark.parametrize("place", ASSIGNED)
@pytest.mark.parametrize("written", ["as it is", "within JSON", "within JSON within JSON"])
def test_what_has_the_name_of_a_secret_is_found_by_it(place, written):
    text = WRITTEN[written](ASSIGNED[place].format(RANDOM))
    assert kinds(text)
    assert RANDOM not in Secrets().redact(text)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", ["of OpenAI", "of GitHub", "of AWS", "a JWT"])
def test_a_token_that_is_broken_is_found_whole(name, how):
    token = TOKENS[name]
    text = f"begin {token[:14]}{BROKEN[how]}{token[14:]} end"
    assert Secrets().redact(text) == f"begin {REDACTED} end"


@pytest.mark.parametrize("begin", ["\x1b[0m", "\\u001b[0m", "%0A"])
def test_a_token_right_after_an_escape_at_the_beginning_is_found(begin):
    assert REDACTED in Secrets().redact(begin + TOKENS["of DigitalOcean"])


def test_a_token_that_is_broken_and_escaped_is_found_whole():
    token = TOKENS["of GitHub"]
    text = json.dumps({"a": f"\x1b[1m{token[:14]}\x1b[0m{token[14:]}", "b": 'say "x"'})
    assert token[20:] not in Secrets().redact(text)
    assert 'say \\"x' in Secrets().redact(text)


@pytest.mark.parametrize("written", WRITTEN)
def test_a_private_key_is_found_whole(written):
    redacted = Secrets().redact(WRITTEN[written](f"KEY={KEY} is set"))
    assert "b3Blbn" not in redacted
    assert redacted.count(REDACTED) == 1


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_left_as_it_is(text):
    assert Secrets().redact(text) == text


def test_the_name_of_a_secret_and_what_follows_it_stay():
    assert Secrets().redact(f"API_KEY={RANDOM} make") == f"API_KEY={REDACTED} make"
    assert Secrets().redact(f"postgresql://me:{RANDOM}@db/app") == f"postgresql://{REDACTED}@db/app"


def test_given_texts_are_found_as_they_are_and_within_json():
    secrets = Secrets(['say "hi"', "acme"])
    assert (
        secrets.redact('acme: say "hi", {"a": "say \\"hi\\""}')
        == f'{REDACTED}: {REDACTED}, {{"a": "{REDACTED}"}}'
    )
    assert Secrets([""]).redact("all of it") == "all of it"


@given(st.text(alphabet='a1\\"n%41u0\x1b[m\u200b \n'), st.sampled_from(sorted(TOKENS)))
def test_what_stands_around_a_secret_does_not_hide_it_and_places_are_in_order(around, name):
    text = f"{around} {TOKENS[name]} {around}"
    found = [(start, end) for _, start, end in Secrets().find(text)]
    assert TOKENS[name] not in Secrets().redact(text)
    assert all(0 <= start < end <= len(text) for start, end in found)
    assert all(before[1] <= after[0] for before, after in pairwise(found))


def test_values_are_redacted_at_every_depth_and_names_of_the_format_stay():
    value = {"reply": [{TOKENS["of GitHub"]: JWT}, 1, None]}
    assert Secrets(["reply"]).redact_values(value) == {"reply": [{REDACTED: REDACTED}, 1, None]}


def test_the_kinds_of_several_texts_are_named_once():
    assert Secrets().kinds([JWT, None, f"again {JWT}"]) == {"JSON Web Token"}
