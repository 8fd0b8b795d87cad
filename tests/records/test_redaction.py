"""Credentials are detected by name and by shape; similar ordinary text is kept."""

from __future__ import annotations

import pytest

from scalebench.records.provenance import is_private, is_secret, mask, mask_assigned

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HOROVOD_JWT", "FI_BEARER", "NCCL_COOKIE", "A_ACCESSKEY", "X_SAS"],
)
def test_secret_names(name):
    assert is_secret(name)
    assert is_private(name)


def test_session_variables_are_private_but_not_secret():
    assert is_private("UCX_SESSION")
    assert is_private("UCX_SESSION_ID")
    assert not is_secret("GDMSESSION")


@pytest.mark.parametrize(
    "name",
    ["OMP_PROC_BIND", "UCX_TLS", "OMP_WAIT_POLICY_PASSIVE", "NCCL_PASSES", "PWD"],
)
def test_other_names(name):
    assert not is_private(name)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("use ghp_abcdefgh1234 now", "use <secret> now"),
        ("github_pat_11AAAA_bcdefgh12", "<secret>"),
        ("hf_abcdefgh1234", "<secret>"),
        ("hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ", "<secret>"),
        ("glpat-abc-defgh12", "<secret>"),
        ("xoxb-1234567890-abc", "<secret>"),
        ("key AKIAIOSFODNN7EXAMPLE,next", "key <secret>,next"),
        (f"is {JWT}, read", "is <secret>, read"),
        ("Authorization: Bearer abc123.def-ghi", "Authorization: Bearer <secret>"),
        (
            "postgres://user:pw@h/db?x=1&password=hunter2222",
            "postgres://<credentials>@h/db?x=1&password=<secret>",
        ),
        ("ftp://user:p@ss@h/x", "ftp://<credentials>@h/x"),
        (
            "a -----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- b",
            "a <secret> b",
        ),
    ],
)
def test_text_with_the_shape_of_a_credential_is_masked(text, left):
    assert mask(text) == left
    assert mask(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "hf_transformers and the bearer of this certificate",
        "sorted(rows, key=attrgetter)",
        "4f1c5e0b2a7d4f1c5e0b2a7d4f1c5e0b2a7d4f1c",
        "https://host:8080/x?steps=10&key=a",
        "shm,tcp eyJ AKIA task-allreduce-with-a-very-long-name",
    ],
)
def test_other_texts_are_kept(text):
    assert mask(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("--token=abcdefgh1234 --n=4", "--token=<secret> --n=4"),
        ("--api-key abcdefgh1234 --n 4", "--api-key <secret> --n 4"),
        ("verbs;cookie=q7!;key=ab12c", "verbs;cookie=<secret>;key=<secret>"),
        ('{"password": "two words", "n": 1}', '{"password": "<secret>", "n": 1}'),
        ("Secret: hush, n: 1", "Secret: <secret>, n: 1"),
        ("AccountKey=abc==;x=1", "AccountKey=<secret>;x=1"),
    ],
)
def test_value_assigned_to_a_secret_name_is_masked(text, left):
    assert mask_assigned(text) == left
    assert mask_assigned(left) == left


@pytest.mark.parametrize(
    "text",
    [
        "auth=none",
        "token=0",
        "btl=tcp,self",
        "btl_tcp_if_include=eth0",
        "a:b:c",
        "key=",
    ],
)
def test_switches_and_other_options_are_kept(text):
    assert mask_assigned(text) == text
