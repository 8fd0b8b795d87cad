"""One-line errors: class, message, and innermost line of user code."""

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


def test_place_is_the_innermost_line_of_user_code():
    def own():
        return torch.zeros(2) @ torch.zeros(3)

    def odd():
        return json.loads("{")

    assert raised(own).endswith(f"({line_of(own, 1)})")
    assert raised(own).startswith("RuntimeError: ")
    assert raised(odd).endswith(f"({line_of(odd, 1)})")
    assert "\n" not in raised(own) + raised(odd)


def test_scalebench_error_has_no_place():
    def refuse():
        raise DataError("no file x;\n  get it")

    assert raised(refuse) == "no file x; get it"


def test_system_exit_and_errors_without_message_or_traceback():
    assert in_one_line(SystemExit(3)) == "exited with code 3 before reporting"
    assert in_one_line(SystemExit()) == "exited with code 0 before reporting"
    assert in_one_line(SystemExit("enough")) == "exited before reporting: enough"
    assert in_one_line(KeyError()) == "KeyError: no message"
