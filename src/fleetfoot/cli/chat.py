"""`fleetfoot chat`: a conversation on the terminal, or with a turn on each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.cli import arguments as flags
from fleetfoot.cli.command import Command, UsageError, count, numbers_line, print_status, started_engine, usage_errors
from fleetfoot.inputs import ChatMessage
from fleetfoot.outputs import CompletionOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.process import StopSignal

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.tokenizer.tokenizer import Tokenizer

# Parameters that do not apply to one streamed text.
_NOT_FOR_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize", "truncate_prompt_tokens")

_COMMANDS = """\
/retry            generate another reply to the last message
/reset            forget the conversation; the system message stays
/system TEXT      set the system message; without TEXT there is none
/set NAME VALUE   set a sampling parameter: /set temperature 0.7; alone it shows those that are set
/save FILE        write the conversation as JSON, a list of messages
/stats            numbers of the last reply and of the chat
/help             this
/exit             end; Ctrl-D and a Ctrl-C at the prompt do it too. A Ctrl-C during a reply stops the reply.
A pasted text is one message, and so are the lines between \"\"\" and \"\"\". A message that begins with a slash needs a
space before it."""
_QUOTES = '"""'

_EPILOG = f"""\
in the chat:
{_COMMANDS}

From a pipe each line, or the text between \"\"\" and \"\"\", is a turn; standard output gets the replies alone, and
everything else goes to standard error."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    text = "a Jinja file, or the name of one of the model's templates"
    parser.add_argument("--chat-template", metavar="FILE_OR_NAME", help=text)
    flags.add_sampling_arguments(parser, leave_out=_NOT_FOR_CHAT, max_tokens=None)
    flags.add_engine_arguments(parser, leave_out=("skip_tokenizer_init",), takes_model=True)


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        flags.check_sampling_arguments(arguments)
    with started_engine(arguments) as (engine, _):
        with usage_errors():
            params = flags.sampling_params(arguments, RequestOutputKind.DELTA, engine.input_processor.sampling_defaults)
        assert engine.tokenizer is not None  # chat has no --skip-tokenizer-init
        template = _chat_template(arguments.chat_template, engine.tokenizer, engine.plan.config.model)
        is_interactive = sys.stdin is not None and sys.stdin.isatty()
        chat = _Chat(engine, engine.tokenizer, params, Conversation(arguments.system), template, is_interactive)
        return chat.run()


def _chat_template(given: str | None, tokenizer: Tokenizer, model: str) -> str | None:
    """The source or name of the template to use; None: the model's default."""
    if given is not None and given not in tokenizer.chat_templates:
        try:
            return Path(given).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
            raise UsageError(
                f"--chat-template {given} is neither a readable file ({error}) nor a template of the model's ({names})"
            ) from error
    if given is None and "default" not in tokenizer.chat_templates:
        raise UsageError(
            f"the model {model!r} has no chat template, so it is not known how it takes a conversation; "
            "give one with --chat-template, or use `fleetfoot generate`"
        )
    return given


@dataclass(slots=True)
class Conversation:
    """A system message and turns, each a user's message and the reply to it."""

    system: str | None = None
    turns: list[list[ChatMessage]] = field(default_factory=list)

    def begin_turn(self, text: str) -> None:
        """Add a user's message."""
        self.turns.append([{"role": "user", "content": text}])

    def end_turn(self, text: str) -> None:
        """Add the reply to it."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def messages(self, first: int = 0) -> list[ChatMessage]:
        """The system message, and the turns from index ``first`` on."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for turn in self.turns[first:] for message in turn]

    def fit(
        self,
        render: Callable[[list[ChatMessage]], str],
        tokenize: Callable[[str], list[int]],
        *,
        limit: int,
        reserve: int,
    ) -> tuple[list[int], int]:
        """The prompt for the next reply. A conversation that is too long loses its oldest turns.

        Args:
            render: makes a text of messages.
            tokenize: makes token ids of a text, or raises ValueError if there are too many.
            limit: most tokens of prompt and reply together.
            reserve: tokens to keep free for the reply, unless the last message alone leaves fewer.

        Returns:
            The prompt's token ids, and the number of dropped turns.

        Raises:
            ValueError: the last message is too long; the conversation has not changed.
        """
        last = len(self.turns) - 1
        for first in range(last + 1):
            text = render(self.messages(first))
            try:
                token_ids = tokenize(text)
            except ValueError:
                if first == last:
                    raise
                continue
            if len(token_ids) + reserve <= limit or (first == last and len(token_ids) < limit):
                del self.turns[:first]
                return token_ids, first
        raise ValueError(
            f"the message makes a prompt of {len(token_ids)} tokens, and there is room for {limit - 1}; "
            f"shorten it, or raise max_model_len where the model allows"
        )


@dataclass(slots=True)
class _Chat:
    """Reads turns and generates a reply to each."""

    engine: LLMEngine
    tokenizer: Tokenizer
    params: SamplingParams
    conversation: Conversation
    template: str | None
    is_interactive: bool
    unanswered: str | None = None
    """The last message, if it has no reply and is forgotten."""
    has_failed: bool = False
    """Whether a turn was refused or failed."""
    num_replies: int = 0
    last_reply: str = ""
    """Its numbers."""

    def run(self) -> int:
        """Run until the input ends or /exit. Returns 1 if a piped turn was refused or failed."""
        if self.is_interactive:
            engine = self.engine
            title = f"{engine.plan.config.model} on {engine.plan.device}, runner {engine.runner_name}"
            print_status(f"{title}. /help shows the commands.")
        for text, is_command in self._messages():
            if is_command:
                if not self._run_command(text):
                    break
            elif text.strip():
                self._turn(text)
        return 1 if self.has_failed and not self.is_interactive else 0

    def _messages(self) -> Iterator[tuple[str, bool]]:
        """Each message or command, and whether it is a command."""
        lines = self._lines()
        for text in lines:
            is_quoted = text.startswith(_QUOTES)
            while is_quoted and not text[3:].rstrip().endswith(_QUOTES) and (line := next(lines, None)) is not None:
                text += f"\n{line}"
            if is_quoted:
                text = text[3:].rstrip().removesuffix(_QUOTES).strip("\n")
            yield text, text.startswith("/") and not is_quoted and "\n" not in text

    def _lines(self) -> Iterator[str]:
        if not self.is_interactive:
            for line in sys.stdin or ():
                yield line.removeprefix("\ufeff").rstrip("\r\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # gives `input` line editing and a history

            readline.parse_and_bind("set enable-bracketed-paste on")
        while True:
            try:
                if not sys.stdout.isatty():
                    print("> ", end="", file=sys.stderr, flush=True)
                text = input("> " if sys.stdout.isatty() else "")
                with contextlib.suppress(EOFError):
                    while not text.startswith("/") and _has_input():  # a pasted text
                        text += f"\n{input()}"
                yield text
            except EOFError:  # Ctrl-D
                print_status("")
                return

    def _run_command(self, line: str) -> bool:
        """Run a line that begins with a slash. Returns False for /exit."""
        name, *rest = line.split(maxsplit=1)
        match name:
            case "/exit":
                return False
            case "/retry":
                self._retry()
            case "/set":
                self._set(*rest)
            case "/save":
                self._save(*rest)
            case "/help":
                print_status(_COMMANDS)
            case "/reset":
                self.conversation.turns.clear()
                self.unanswered = None
                print_status("the conversation is forgotten")
            case "/system":
                self.conversation.system = rest[0].strip() if rest else None
                print_status("the system message is set" if rest else "there is no system message now")
            case "/stats":
                print_status(self._stats())
            case unknown:
                print_status(f"unknown command {unknown}; /help shows the commands")
        return True

    def _retry(self) -> None:
        turns = self.conversation.turns
        if self.unanswered is None and not turns:
            print_status("there is no message yet")
            return
        if self.params.seed is not None:  # the same seed would draw the same reply
            self.params = dataclasses.replace(self.params, seed=(self.params.seed + 1) % 2**63)
        self._turn(turns.pop()[0]["content"] if self.unanswered is None else self.unanswered)

    def _set(self, text: str = "") -> None:
        name, value, *_ = *re.split(r"\s+|=", text.strip(), maxsplit=1), ""
        name = name.removeprefix("--").replace("-", "_")
        names = [n for n in flags.SAMPLING_NAMES if n not in _NOT_FOR_CHAT]
        try:
            if name:
                self.params = flags.changed_sampling_params(self.params, name, value.strip(), names)
        except ValueError as error:
            print_status(f"/set: {error}")
            return
        default = SamplingParams()
        shown = [name] if name else [n for n in names if getattr(self.params, n) != getattr(default, n)]
        print_status("; ".join(f"{n} is {getattr(self.params, n)}" for n in shown) or "nothing is set")

    def _save(self, file: str = "") -> None:
        path = Path(os.path.expanduser(file.strip()))
        content = json.dumps(self.conversation.messages(), indent=2, ensure_ascii=False) + "\n"
        try:
            path.write_text(content, encoding="utf-8", errors="replace")
            print_status(f"{count(len(self.conversation.turns), 'turn')} written to {path}")
        except (OSError, ValueError) as error:
            print_status(f"/save FILE: {error}")

    def _stats(self) -> str:
        if not self.num_replies:
            return "no reply yet"
        stats = self.engine.stats()
        return (
            f"last reply: {self.last_reply}\nchat: {count(self.num_replies, 'reply', 'replies')}, "
            f"{count(len(self.conversation.turns), 'turn')} remembered, {stats.num_prompt_tokens} tokens in "
            f"({stats.scheduler.prefix_cache_hits} from the prefix cache), {stats.num_generation_tokens} out"
        )

    def _turn(self, text: str) -> None:
        """Print the reply to a message; a turn without one is dropped."""
        self.conversation.begin_turn(text)
        try:
            reply = self._reply(self._prompt())
        except (ValueError, TypeError) as error:  # refused before anything was generated; the chat continues
            reply = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
        self.unanswered = None
        if reply.text or reply.finish_reason in ("stop", "length"):
            self.conversation.end_turn(reply.text)
        else:
            self.conversation.turns.pop()
            self.unanswered = text
        self.has_failed |= reply.finish_reason == "error"
        if reply.finish_reason == "error":
            print_status(f"fleetfoot chat: error: {reply.stop_reason}")
        elif reply.finish_reason == "abort":
            print_status("(stopped)" if reply.text else "(stopped before the first word: the turn is forgotten)")

    def _prompt(self) -> list[int]:
        """Token ids of the conversation; drops its oldest turns if it is too long."""
        limit = self.engine.max_request_len
        reserve = limit // 4 if self.params.max_tokens is None else min(limit // 4, self.params.max_tokens)
        apply = partial(self.tokenizer.apply_chat_template, chat_template=self.template, tokenize=False)
        render = partial(apply, add_generation_prompt=True)
        token_ids, num_dropped = self.conversation.fit(render, self._tokenize, limit=limit, reserve=reserve)
        if num_dropped:
            turns = count(num_dropped, "turn")
            print_status(f"(the conversation grew too long; forgotten from its beginning: {turns})")
        return token_ids

    def _tokenize(self, text: str) -> list[int]:
        return self.engine.input_processor.tokenize(text, add_special_tokens=False).tolist()

    def _reply(self, token_ids: list[int]) -> CompletionOutput:
        """Stream one reply to standard output; returns it with its whole text. Raises ValueError or TypeError if the
        engine refuses the request."""
        room = self.engine.max_request_len - len(token_ids)
        max_tokens = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        params = dataclasses.replace(self.params, max_tokens=max_tokens)
        begin = time.perf_counter()
        self.engine.add_request("reply", {"prompt_token_ids": token_ids}, params)
        text = ""
        with StopSignal() as stop:
            while True:
                for output in self.engine.step():
                    completion = output.outputs[0]
                    text += completion.text
                    print(completion.text, end="", flush=True)
                    if output.finished:
                        print(flush=True)
                        self.num_replies += 1
                        self.last_reply = numbers_line([output.metrics], time.perf_counter() - begin)
                        completion.text = text
                        return completion
                if stop.is_set:
                    self.engine.abort_request("reply")


def _has_input() -> bool:
    """Whether the terminal has input that was not read."""
    with contextlib.suppress(OSError, ValueError):  # standard input is no file, or of a kind that select does not take
        return bool(select.select([sys.stdin], [], [], 0.02)[0])
    return False


COMMAND = Command("chat", "talk with a model", _add_arguments, _run, _EPILOG, "[MODEL] ")
