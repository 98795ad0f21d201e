"""What is a secret by its name or its form, and what is not: false alarms make logs useless."""

from __future__ import annotations

import base64
import json
import random
import string

import pytest

from miles_async.config.redaction import REDACTED, is_secret, redact_text, redacted

SECRET_NAMES = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN hfToken WANDB_API_KEY PGPASSWORD MYSQL_PWD MYSQL_ROOT_PASSWORD REDIS_PASSWORD
REDISCLI_AUTH accessToken access_token refreshToken id-token sessionToken clientSecret client_secret CLIENTSECRET
api_key apiKey apikey APIKEY api-key api_keys x-api-key X-Api-Key AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
AWS_ACCESS_KEY AZURE_CLIENT_SECRET AZURE_STORAGE_KEY GOOGLE_API_KEY GITHUB_PAT GITHUB_TOKEN GITLAB_PAT CI_JOB_TOKEN
NPM_TOKEN PYPI_TOKEN SLACK_WEBHOOK SLACK_WEBHOOK_URL DISCORD_WEBHOOK slackWebhook SENTRY_DSN DATABASE_DSN password
Password passwords db.password DBPASSWORD dbPassword user_password userpasswd passwd pwd DB_PWD passphrase
ssh_passphrase KEY_PASSPHRASE passcode secret secrets SECRET_KEY my_secret JWT_SECRET signing_key SIGNATURE cookie
Set-Cookie COOKIES Authorization authorization auth AUTH_HEADER proxy-authorization basicAuth authkey AUTH_KEY bearer
BEARER_TOKEN credentials CREDENTIAL google_credentials private_key privateKey PRIVATEKEY ssh_private_key TLS_KEY
encryption_key ENCRYPTIONKEY_SECRET master_key token tokens key keys pass SMTP_PASS RAY_AUTH_TOKEN RAY_REDIS_PASSWORD
OPENAI_API_KEY ANTHROPIC_API_KEY TAVILY_API_KEY SERPER_KEY judge_key COMET_API_KEY NEPTUNE_API_TOKEN
CLEARML_API_SECRET_KEY SWANLAB_API_KEY MLFLOW_TRACKING_PASSWORD KAGGLE_KEY apitoken authtoken accesstoken
secretkey_password
""".split()
ORDINARY_NAMES = """
PWD OLDPWD
max_total_tokens max_new_tokens min_tokens num_tokens prompt_tokens total_tokens tokens_per_step eos_token pad_token
bos_token unk_token mask_token token_id token_ids eos_token_id stop_token_ids tokenizer tokenizer_path tokenizer_mode
skip_special_tokens image_token special_tokens token_length tokenLimit think_token vocab_tokens input_key output_key
label_key reward_key metadata_key prompt_key tool_key cache_key sort_key keyLength primary_key num_keys key_name
multimodal_keys keyboard monkey keynote author authority authored passing passed bypass compass path PATH HOME
LD_LIBRARY_PATH NCCL_DEBUG CUDA_VISIBLE_DEVICES chunked_prefill_size model_path run_name checksum commit seed
secretary patch pattern pathology cookiecutter_
""".split()
SECRET_TEXTS = [
    "hf_abcdefghijklmnopqrstuvwxyzABCDEF",
    "sk-proj-abc123DEF456ghi789JKL012",
    "sk-ant-api03-abcdefghijklmnop",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "gho_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijklmnop",
    "glpat-abcdefghij0123456789",
    "xoxb-1234567890-abcdefghij",
    "xoxp-1234567890-abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi-AgEIcHlwaS5vcmcCJGFiY2RlZmdoaWprbG1ub3A",
    "dckr_pat_abcdefghijklmnopqrstu",
    "sk_live_abcdefghijklmnop1234",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abcdefghijk",
    "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r",
    "T00000000/B00000000/XXXXXXXXXXXXXXXX",
]
SECRET_SENTENCES = [
    ("http://user:{}@host/", "hunter2hunter2"),
    ("http://user:{}@host/", "p@ss"),
    ("postgresql://me:{}@db:5432/runs", "hunter2hunter2"),
    ("redis://:{}@localhost/0", "hunter2hunter2"),
    ("postgres://me:{}@db/runs", "hunter2/hunter2"),
    ("https://x/?token={}&b=1", "abc"),
    ("https://x/?b=1&api_key={}", "abc"),
    ("https://x/#access_token={}", "abc"),
    ("https://x/?X-Amz-Signature={}&n=1", "0123abcd"),
    ("Authorization: Bearer {}", "hunter2-hunter2"),
    ("authorization: Basic {}", "dXNlcjpwYXNzd29yZA=="),
    ("x-api-key: {}", "hunter2-hunter2"),
    ("Set-Cookie: {}", "session=abcdefgh1234"),
    ("api_key='{}'", "hunter2-hunter2"),
    ('{{"client_secret": "{}"}}', "hunter2-hunter2"),
    ("PGPASSWORD={} psql", "hunter2-hunter2"),
    ("--api-key={}", "hunter2-hunter2"),
    ("export HF_TOKEN={}", "hunter2-hunter2"),
    ("token={}", "abc123def456ghi7"),
    ("https://hooks.slack.com/services/{}", "T00000000/B00000000/XXXXXXXXXXXX"),
    ("https://discord.com/api/webhooks/{}", "123456789/abcdefghijkl"),
    *(("the server said {} to us", text) for text in SECRET_TEXTS[:-1]),
]
ORDINARY_TEXTS = [
    "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "commit 4d6340e2b1a94a8fe5ccb19ba61c4c0873d391e9",
    "123e4567-e89b-12d3-a456-426614174000",
    "20261124-103000-arithmetic",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "meta-llama/Llama-3.1-405B-Instruct-FP8-dynamic",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "/root/models/DeepSeek-V3-0324/model-00001-of-000163.safetensors",
    "C:\\models\\Qwen3-8B",
    "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async",
    "Qwen3MoeForCausalLMWithSharedExperts",
    "mail me@example.org about http://host/",
    "http://127.0.0.1:8000/metrics?span=whole&key_name=a",
    "https://github.com/owner/name/issues/123",
    "https://host/path@2x.png",
    "https://host:8080/path@2x.png",
    "http://[::1]:8080/path@2x.png",
    "the key is under the mat",
    "the token budget: 4096000000",
    "tokens: 12345678",
    "key=sample_0_0",
    "key: rollout_batch",
    "max_new_tokens=128000000",
    "eos_token: <|endoftext|>",
    "reward_key=accuracy_reward",
    "input_key: conversations",
    "path=/tmp/run/checkpoint_000123",
    "group sample_0_12345 has version 12",
    "What is 123456789 * 987654321? The answer is 121932631112635269.",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ABABAB1ababab1ABABAB1ababab1ABABAB1ababab1",
    "decoder.layers.12.mlp.experts.local_experts.127.linear_fc1.weight",
    "2026-11-24T10:30:00.123456+00:00",
    "torch==2.13.0+cpu",
    "1e-05",
    "grad_norm=0.123456789012345678",
    "rollout_function_path=my_project.functions.generate_rollout",
    "passing --resume auto continues the run",
    "",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
@pytest.mark.parametrize("value", ["hunter2", 12345678, ["hunter2"], {"user": "hunter2"}], ids=str)
def test_whatever_a_secret_name_names_is_left_out(name: str, value: object) -> None:
    shown = json.dumps(redacted({name: value}))
    assert "hunter2" not in shown
    assert "12345678" not in shown


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_an_ordinary_name_keeps_its_value(name: str) -> None:
    assert redacted({name: "value"}) == {name: "value"}


@pytest.mark.parametrize("sentence, secret", SECRET_SENTENCES)
def test_a_credential_in_a_text_is_left_out(sentence: str, secret: str) -> None:
    shown = redact_text(sentence.format(secret))
    assert secret not in shown
    assert REDACTED in shown


@pytest.mark.parametrize("text", ORDINARY_TEXTS)
def test_an_ordinary_text_stays_what_it_is(text: str) -> None:
    assert redact_text(text) == text
    assert redacted({"note": text, "notes": [text]}) == {"note": text, "notes": [text]}


@pytest.mark.parametrize("seed", range(50))
def test_random_keys_are_left_out_of_any_text(seed: int) -> None:
    numbers = random.Random(seed)
    raw = numbers.randbytes(32)
    keys = (
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
        "".join(numbers.choices(string.ascii_letters + string.digits, k=40)),
    )
    for key in keys:
        assert key not in redact_text(f"the client sent {key}, which is wrong")


@pytest.mark.parametrize("value", [None, True, False, ""])
def test_a_secret_that_is_not_set_is_shown_as_such(value: object) -> None:
    assert redacted({"api_key": value}) == {"api_key": value}


def test_names_are_split_into_words_however_they_are_joined() -> None:
    assert all(map(is_secret, ("db.password", "dbPassword", "DB_PASSWORD", "db-password", "DBPASSWORD", "db password")))
