"""Whether the model thinks and how hard, from the five ways clients have of saying so.

Clients were written against different servers, and most of them send more than one form. The order here is:
`thinking`, then `enable_thinking`, then `chat_template_kwargs`, then `reasoning_effort`; the first that says
whether to think decides that, the first that says how hard decides that. Source: specification 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.daemon.api.schemas import refuse_unserved
from sluice.io.errors import RequestError

DEFAULT_EFFORT = "max"  # as the vendor's own template has it when nobody says

# Words that clients send and the model does not know; `medium` is sent unasked by many.
_EFFORTS = {"low": "low", "high": "high", "max": "max", "minimal": "low", "medium": "high", "xhigh": "max"}
_OFF = ("none", "off")
EFFORT_WORDS = (*_EFFORTS, _OFF[0])  # what a request may say

_TEMPLATE_KEYS = ("thinking", "enable_thinking", "thinking_effort", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Thinking:
    """effort is None when `on` is False."""

    on: bool
    effort: str | None

    @property
    def word(self) -> str:
        """For the reply: the effort, or "off"."""
        return self.effort or "off"


def thinking_of(
    thinking: bool | Mapping[str, Any] | None,
    enable_thinking: bool | None,
    template: Mapping[str, Any] | None,
    reasoning_effort: str | None,
) -> Thinking:
    """The one meaning of what a request says. Raises RequestError with the path of a word nobody knows."""
    switches: list[bool] = []
    efforts: list[str] = []

    def effort(value: object, param: str) -> None:
        if value is None:
            return
        if not isinstance(value, str) or value not in (*_EFFORTS, *_OFF):
            words = ", ".join(EFFORT_WORDS)
            raise RequestError(f"{param} is {str(value)[:64]!r}; it must be one of {words}", param=param)
        if value in _OFF:
            switches.append(False)
        else:
            efforts.append(_EFFORTS[value])

    def switch(value: object, param: str) -> None:
        if value is None:
            return
        if not isinstance(value, bool):
            raise RequestError(f"{param} must be true or false", param=param)
        switches.append(value)

    if isinstance(thinking, Mapping):
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive", "auto", None):
            raise RequestError("thinking.type must be enabled or disabled", param="thinking.type")
        if kind is not None:
            switches.append(kind != "disabled")
        effort(thinking.get("effort"), "thinking.effort")
        if thinking.get("keep") not in (None, "all"):
            raise RequestError("thinking.keep must be all: the model is made to see all of it", param="thinking.keep")
    else:
        switch(thinking, "thinking")
    switch(enable_thinking, "enable_thinking")
    if template:
        refuse_unserved({f"chat_template_kwargs.{key}": value for key, value in template.items()},
                        [f"chat_template_kwargs.{key}" for key in _TEMPLATE_KEYS])  # fmt: skip
        for key in ("thinking", "enable_thinking"):
            switch(template.get(key), f"chat_template_kwargs.{key}")
        for key in ("thinking_effort", "reasoning_effort"):
            effort(template.get(key), f"chat_template_kwargs.{key}")
    effort(reasoning_effort, "reasoning_effort")
    on = switches[0] if switches else True
    return Thinking(on, (efforts[0] if efforts else DEFAULT_EFFORT) if on else None)
