"""The pages of docs/reference, written when the site is built: commands, keys of a study, Python functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from scalebench import analysis, figures
from scalebench.cli.main import COMMANDS, command_of
from scalebench.comm.base import Communicator
from scalebench.strategies.base import Strategy, Worker
from scalebench.study.spec import Study

_SIGNATURE_CHARACTERS = 60


def write(folder: Path) -> None:
    """Write commands.md, study.md and python.md to `folder`; a page that has not changed keeps its time stamp."""
    folder.mkdir(exist_ok=True)
    for name, lines in {
        "commands": commands(),
        "study": keys_of_a_study(),
        "python": python(),
    }.items():
        path, text = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands() -> Iterator[str]:
    """Yield the page of all commands: purpose, arguments, options and examples."""
    yield "# Commands\n\nGenerated from the commands themselves; `scalebench COMMAND --help` prints the same.\n"
    for name, purpose in COMMANDS.items():
        command = command_of(name)
        context = click.Context(command, info_name=name)
        yield f"## {name}\n\n{purpose}\n"
        yield f"```text\nscalebench {name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
        yield from _help(command.help or "")
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                child = command.get_command(context, each)
                assert child is not None
                yield f"- `{name} {each}`: {_cell(child.get_short_help_str(200))}"
            yield ""
        rows = [
            row
            for parameter in command.get_params(context)
            if (row := parameter.get_help_record(context))
        ]
        rows = [(option, text) for option, text in rows if text and option != "--help"]
        if rows:
            yield "| option | what it does |\n|---|---|"
            yield from (
                f"| {_cell(f'`{option}`')} | {_cell(text)} |" for option, text in rows
            )
            yield ""


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs after the first line; those that click does not rewrap are examples."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield f"```text\n{paragraph.lstrip(chr(8)).strip()}\n```\n"
        else:
            yield _plain(paragraph) + "\n"


def keys_of_a_study() -> Iterator[str]:
    """Yield the page of the keys of a study file, from its schema."""
    schema = Study.model_json_schema()
    yield "# Keys of a study\n\nGenerated from the model of study files; `scalebench schema` prints it for editors.\n"
    yield from _keys(schema)
    for name, part in sorted(schema.get("$defs", {}).items()):
        if part.get("properties") and part.get("description"):
            yield f"\n## {name}\n\n{_plain(part['description'])}\n"
            yield from _keys(part)


def _keys(schema: dict[str, Any]) -> Iterator[str]:
    yield "| key | default | meaning |\n|---|---|---|"
    for key, value in schema["properties"].items():
        default = (
            _cell(f"`{value['default']}`")
            if value.get("default") not in (None, "")
            else ""
        )
        yield f"| `{key}` | {default} | {_cell(value.get('description', ''))} |"


def python() -> Iterator[str]:
    """Yield the page of public Python functions and classes, from their signatures and docstrings."""
    yield "# Python\n\nGenerated from the docstrings. [In a notebook](../python.md) shows these functions at work.\n"
    for module in (analysis, figures):
        yield f"## {module.__name__}\n\n{_plain(inspect.getdoc(module) or '')}\n"
        for name in module.__all__:
            yield from _entry(f"{module.__name__}.{name}", getattr(module, name), "###")
    yield "## For strategies of your own\n"
    for kind in (Strategy, Worker, Communicator):
        yield from _entry(f"{kind.__module__}.{kind.__name__}", kind, "###")
        for name, member in vars(kind).items():
            if not name.startswith(("_", "model_")) and (
                callable(member) or isinstance(member, property)
            ):
                yield from _entry(name, member, "####")


def _entry(title: str, thing: Any, heading: str) -> Iterator[str]:
    text = inspect.getdoc(thing)
    if not text or not (
        inspect.isroutine(thing)
        or inspect.isclass(thing)
        or isinstance(thing, property)
    ):
        return
    yield f"{heading} {title}\n"
    if inspect.isroutine(thing):
        yield f"```python\n{title.rpartition('.')[2]}{_signature(thing)}\n```\n"
    paragraphs = text.split("\n\n")
    for paragraph in paragraphs:
        head, _, rest = paragraph.partition("\n")
        if head in ("Raises:", "Args:", "Returns:"):
            items = re.split(r"\n(?=\S)", inspect.cleandoc(rest))
            yield (
                f"*{head[:-1]}*\n\n"
                + "\n".join(f"- {_plain(item)}" for item in items)
                + "\n"
            )
        else:
            yield _plain(paragraph) + "\n"


def _signature(function: Callable[..., Any]) -> str:
    """Return the parameters and the result, a long list with one parameter to a line."""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    if len(text) <= _SIGNATURE_CHARACTERS:
        return text
    inside, _, result = text[1:].rpartition(")")
    lines = re.split(r", (?![^\[]*\])", inside)
    return "\n".join(["(", *(f"    {line}," for line in lines), f"){result}"])


def _plain(text: str) -> str:
    """Return one paragraph on one line; outside code, what Markdown would take for a tag or emphasis is escaped."""
    parts = re.sub(r"\s+", " ", text.replace("``", "`")).strip().split("`")
    return "`".join(
        part if place % 2 else re.sub(r"([<*_\[])", r"\\\1", part)
        for place, part in enumerate(parts)
    )


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
