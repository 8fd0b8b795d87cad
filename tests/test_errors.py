"""What an error says in one line: its kind, its words, and the line of code of whoever wrote the strategy or model."""

import json

import pytest
import torch

from scalebench.errors import DataError, in_one_line


def raised(function, *arguments):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function(*arguments)
    return in_one_line(caught.value)


def line_of(function, offset):
    return f"test_errors.py:{function.__code__.co_firstlineno + offset}"


def test_the_line_is_the_innermost_that_is_neither_ours_nor_torchs_nor_pythons():
    def own():
        return torch.zeros(2) @ torch.zeros(3)

    def odd():
        return json.loads("{")

    assert raised(own).endswith(f"({line_of(own, 1)})")
    assert raised(own).startswith("RuntimeError: ")
    assert raised(odd).endswith(f"({line_of(odd, 1)})")
    assert "\n" not in raised(own) + raised(odd)


def test_a_message_for_the_user_stays_as_it_is():
    def refuse():
        raise DataError("no file x;\n  get it")

    assert raised(refuse) == "no file x; get it"


def test_leaving_and_errors_without_words_or_place():
    assert in_one_line(SystemExit(3)) == "exited with code 3 before reporting"
    assert in_one_line(KeyError()) == "KeyError: no message"
