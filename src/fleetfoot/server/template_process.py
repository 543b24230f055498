"""Renders a chat template that a request has brought in a process of its own, with limits of time and memory.

A template is a program: in the server's process, a loop or a huge string would hold up all requests.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from typing import Any

from fleetfoot.config import env
from fleetfoot.tokenizer.chat_template import ChatTemplate

TEMPLATE_S = 5.0
"""Seconds that a template has, with the start of its process."""
Messages = Sequence[Mapping[str, Any]]
_MAX_MEMORY = 1 << 30
_MAX_CHARS = 16 << 20


async def render_apart(
    source: str, conversations: Sequence[Messages], options: Mapping[str, Any], seconds: float = TEMPLATE_S
) -> list[str]:
    """The prompts for conversations, as `ChatTemplate.render` with ``options`` makes them.

    Raises ValueError: as that, or the template takes too much time or memory for all of them.
    """
    content = json.dumps([source, conversations, options]).encode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env.for_child({})
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate(content)
    except TimeoutError:
        raise ValueError(f"chat_template has not been rendered after {seconds:g} s, which is the limit") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ValueError(
            f"chat_template has ended its process with code {process.returncode}; it takes too much memory"
        )
    texts, problem = json.loads(output)
    if problem is not None:
        raise ValueError(problem)
    rendered: list[str] = texts
    return rendered


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    source, conversations, options = json.load(sys.stdin)
    texts: list[str] = []
    try:
        template, num_chars = ChatTemplate(source), 0
        for messages in conversations:
            texts.append(template.render(messages, **options))
            num_chars += len(texts[-1])
            if num_chars > _MAX_CHARS:
                raise ValueError(f"chat_template makes {num_chars} characters; {_MAX_CHARS} are the most")
    except ValueError as error:
        json.dump([None, str(error)], sys.stdout)
    else:
        json.dump([texts, None], sys.stdout)


if __name__ == "__main__":
    main()
