from __future__ import annotations

import time

import pytest

from data.redact import redact, redact_all

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("secret", "placeholder"),
    [
        ("sk-proj-abcdefghijklmnop1234", "<api_key>"),
        ("sk-ant-api03-abcdefghijklmnop", "<api_key>"),
        ("AKIAIOSFODNN7EXAMPLE", "<api_key>"),
        ("ghp_" + "a1" * 18, "<api_key>"),
        ("xoxb-1234567890-abcdef", "<api_key>"),
        ("pk-lf-01234567-89ab-cdef", "<api_key>"),
        ("rk_live_" + "a1" * 12, "<api_key>"),
        ("github_pat_" + "a1" * 12, "<api_key>"),
        ("glpat-" + "a1" * 10, "<api_key>"),
        ("gsk_" + "a1" * 20, "<api_key>"),
        ("nvapi-" + "a1" * 20, "<api_key>"),
        ("npm_" + "a1" * 18, "<api_key>"),
        ("SG." + "a1" * 10 + "." + "b2" * 10, "<api_key>"),
        ("ASIAIOSFODNN7EXAMPLE", "<api_key>"),
        ("hf_" + "Ab" * 17, "<api_key>"),
        ("AIza" + "x" * 35, "<api_key>"),
        (JWT, "<jwt>"),
        ("alice.o+list@mail.example.co.uk", "<email>"),
        ("192.168.0.17", "<ip_address>"),
        ("2001:db8::8a2e:370:7334", "<ip_address>"),
        ("::ffff:10.0.0.1", "<ip_address>"),
        ("fe80::1", "<ip_address>"),
        ("1:2:3:4:5:6:7:8", "<ip_address>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----", "<private_key>"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "use {} now", "值「{}」。", '"{}",', "({})."])
def test_a_credential_or_an_address_leaves_a_placeholder_and_the_text_around_it(
    secret: str, placeholder: str, around: str
) -> None:
    assert redact(around.format(secret)) == around.format(placeholder)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Authorization: Bearer abcdefghijklmnop.qrstuvwx==", "Authorization: Bearer <token>"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic <token>"),
        ("postgres://bob:s3cret@db.internal:5432/x", "postgres://<password>@db.internal:5432/x"),
        ("https://a.example/v1?model=m&api_key=12ab&n=1", "https://a.example/v1?model=m&api_key=<password>&n=1"),
        ("sent from 10.0.0.1:8080, then 10.0.0.2.", "sent from <ip_address>:8080, then <ip_address>."),
        ("mail 我alice@example.com吧", "mail 我<email>吧"),
    ],
)
def test_what_surrounds_a_secret_stays(text: str, wanted: str) -> None:
    assert redact(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "at 12:30:45 std::vector<int> a[::2] + a[1::2] and ::foo",
        "http://host:8080/path and version 1.2.3, 1.2.3.4.5 or 300.1.1.1",
        "task-sk-1 risk-averse-and-longer-than-16 @app.route f(x)@y",
        "bearer of bad news; a skeleton key; token = tokenizer(text)",
        "a/b@c, x:y@z",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_every_text_of_a_nested_value_is_redacted_and_all_else_kept() -> None:
    value = {"a": [{"text": "to bob@example.com", "n": 3}], "bob@example.com": None, "b": True, "c": 1.5}
    assert redact_all(value) == {"a": [{"text": "to <email>", "n": 3}], "bob@example.com": None, "b": True, "c": 1.5}


def test_redacting_twice_changes_nothing() -> None:
    text = f"{JWT} https://u:p@h/?token=abc bob@example.com Bearer {'x' * 20} 10.1.1.1 fe80::1"
    assert redact(redact(text)) == redact(text) != text


@pytest.mark.parametrize("unit", ["a", "a.", "1.", "a:", "eyJ", "sk-", "-----BEGIN PRIVATE KEY-----", "http://", "a@"])
def test_the_time_is_linear_in_the_text(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    started = time.process_time()
    redact(text)
    assert time.process_time() - started < 2
