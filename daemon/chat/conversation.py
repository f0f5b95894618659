"""What a server refuses although the renderer could write it: a conversation's shape, before it becomes a prompt.

Covers messages and tools (specification 2.4, 2.6, 4.2). Sampling fields and the rest belong to the API's schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.daemon.chat.xtml import call_function
from sluice.io.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}", re.ASCII)


def check(messages: Any, tools: Any = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and declared tools as the renderer may have them; raises RequestError with a path.

    Messages come back as new objects with `developer` mapped to `system`; nothing else is changed. The second value
    is every tool in force: the request's, then those that system messages add.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    names: set[str] = set()
    declared = check_tools(tools, "tools", names)
    checked = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{path} must be an object", param=path)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{path}.role {role!r} is not one of {', '.join(ROLES)}", param=f"{path}.role")
        if role == "developer":
            role = "system"
        if message.get("tools"):
            if role != "system":
                raise RequestError(f"{path}: tools may stand in system messages only", param=f"{path}.tools")
            if message.get("content"):
                raise RequestError(
                    f"{path}: a system message that adds tools cannot have content", param=f"{path}.content"
                )
            declared += check_tools(message["tools"], f"{path}.tools", names)
        if role == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str) or not call_id:
                raise RequestError(f"{path}: a tool message needs a tool_call_id", param=f"{path}.tool_call_id")
        if role == "assistant":
            _check_call_ids(message.get("tool_calls"), f"{path}.tool_calls")
            if message.get("partial"):
                raise RequestError(f"{path}: continuing a partial answer is not served", param=f"{path}.partial")
        checked.append({**message, "role": role})
    return checked, declared


def check_tools(tools: Any, path: str, taken: set[str]) -> list[dict[str, Any]]:
    """A list of tool declarations; `taken` holds the names declared so far and gains these. None is an empty list."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"{path} must be a list", param=path)
    for index, tool in enumerate(tools):
        at = f"{path}[{index}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{at} must be an object", param=at)
        if tool.get("type") != "function":
            raise RequestError(f"{at}.type must be function", param=f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{at}.function must be an object", param=f"{at}.function")
        name = function.get("name")
        if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
            raise RequestError(
                f"{at}.function.name must be 1 to 256 letters, digits, '_', '.' or '-', beginning with a letter or '_'",
                param=f"{at}.function.name",
            )
        if name in taken:
            raise RequestError(f"{at}: a tool called {name} is declared already", param=f"{at}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{at}.function.parameters must be an object", param=f"{at}.function.parameters")
        taken.add(name)
    return list(tools)


def _check_call_ids(calls: Any, path: str) -> None:
    if not calls:
        return
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{path} must be a list", param=path)
    seen: set[str] = set()
    for index, call in enumerate(calls):
        call_function(call, f"{path}[{index}]")
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise RequestError(f"{path}[{index}].id must be a string", param=f"{path}[{index}].id")
        if call_id is not None and call_id in seen:
            # Results are matched to the first of two calls with one id, so the second would get no result of its own.
            raise RequestError(f"{path}[{index}].id {call_id!r} occurs twice", param=f"{path}[{index}].id")
        seen.add(call_id or "")
