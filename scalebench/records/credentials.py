"""Detection of credentials by variable name, by shape, and by the name assigned inside a text."""

from __future__ import annotations

import re

MASK = "<secret>"
SWITCHES = ("true", "false", "yes", "none", "off", "auto", "null")  # not secrets under any name
SHORTEST_WORD = 3  # characters of a secret among the environment's own values; shorter ones are switches and counts

_NAME = re.compile(
    r"TOKEN|SECRET|PASS(?!IVE|ES)|CREDENTIAL|PRIVATE|API_?KEY|ACC(?:ESS|OUNT)_?KEY|AUTH|JWT|BEARER|COOKIE"
    r"|_(?:KEY|PWD|PAT|SAS)(?:_|$)",
    re.IGNORECASE,
)
_SESSION = re.compile(r"SESSION(?:_?ID)?$", re.IGNORECASE)  # GDMSESSION=ubuntu is harmless
_IN_ADDRESS = re.compile(r"://(?:[^/@\s]+@)+")
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      gh[opsur]_[A-Za-z0-9]{8,} | github_pat_\w{8,} | glpat-[\w-]{8,}     # GitHub, GitLab
    | hf_(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{8,}|[A-Za-z]{20,})                 # Hugging Face
    | xox[a-z]-[\w-]{8,} | sk-[\w-]{20,} | AIza[\w-]{20,}                 # Slack, OpenAI and alike, Google
    | (?:AKIA|ASIA)[A-Z0-9]{8,} | (?:npm|dckr_pat)_[\w-]{20,} | pypi-[\w-]{20,}
    | eyJ[\w-]{8,}(?:\.[\w-]*){0,4}                                       # JSON web tokens: base64 of {"
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"\b(bearer\s+)(?=[\w.~+/-]*[\d.~+/=_-])[\w.~+/-]{8,}=*", re.IGNORECASE)
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s,;&"'<>()\[\]{}]+)"""
_QUERY = re.compile(rf"(?P<before>[?&](?P<name>[\w.-]+)=){_VALUE}")
_ASSIGNED = re.compile(
    rf"""(?P<before>(?:(?P<name>[A-Za-z_][\w.-]*)(?:["']?\s*=\s*|["']\s*:\s*|:\s+)|--?(?P<option>[A-Za-z][\w-]*)\s+)){_VALUE}"""
)


def is_secret(name: str) -> bool:
    """Return True if the value of the variable `name` is a secret."""
    return bool(_NAME.search(name))


def is_private(name: str) -> bool:
    """Return True if the variable `name` is not to be recorded: secrets and sessions."""
    return is_secret(name) or bool(_SESSION.search(name))


def mask(text: str) -> str:
    """Return `text` without credentials in addresses and their queries and without values of a known shape."""
    text = _IN_ADDRESS.sub("://<credentials>@", text)
    text = _BEARER.sub(rf"\1{MASK}", _SHAPES.sub(MASK, text))
    return _QUERY.sub(_masked, text)


def mask_assigned(text: str) -> str:
    """Return a value of the environment without values assigned to secret names: --token=X, key=X, "password": "X".

    Not for program text, in which `key=` is an ordinary argument.
    """
    return _ASSIGNED.sub(_masked, text)


def _masked(found: re.Match[str]) -> str:
    groups = found.groupdict()
    name = (groups["name"] or groups.get("option", "")).replace("-", "_").replace(".", "_")
    value = groups["value"].strip("\"'")
    if len(value) < SHORTEST_WORD or value.lower() in SWITCHES or not is_private(f"_{name}"):
        return found[0]
    return groups["before"] + groups["value"].replace(value, MASK)
