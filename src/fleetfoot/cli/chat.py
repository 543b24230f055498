"""`fleetfoot chat`: a conversation on the terminal, or with a turn on each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.cli.arguments import add_engine_arguments
from fleetfoot.cli.command import Command, UsageError, usage_errors
from fleetfoot.cli.conversation import Conversation, fit
from fleetfoot.cli.numbers import count, numbers_line
from fleetfoot.cli.sampling_arguments import add_sampling_arguments, check_sampling_arguments, sampling_params
from fleetfoot.cli.start import StartedEngine, started_engine
from fleetfoot.records.outputs import RequestMetrics
from fleetfoot.records.prompts import ChatMessage
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.utils.interrupts import StopSignal

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

# A reply is one text, shown as it is made.
_NOT_FOR_CHAT = ("n", "logprobs", "prompt_logprobs", "detokenize", "truncate_prompt_tokens")

_COMMANDS = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT there is none
/stats         numbers of the last reply and of the chat
/help          this
/exit          end; Ctrl-D and a Ctrl-C at the prompt do it too. A Ctrl-C during a reply stops the reply.
A message that begins with a slash needs a space before it."""

_EPILOG = f"""\
in the chat:
{_COMMANDS}

From a pipe each line is a turn; standard output gets the replies alone, and everything else goes to standard error."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--chat-template", metavar="FILE_OR_NAME", help="a Jinja file, or the name of one of the model's templates"
    )
    add_sampling_arguments(parser, leave_out=_NOT_FOR_CHAT, max_tokens=None)
    add_engine_arguments(parser, leave_out=("skip_tokenizer_init",))


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        check_sampling_arguments(arguments)
    with started_engine(arguments) as started:
        with usage_errors():
            params = sampling_params(arguments, RequestOutputKind.DELTA, started.engine.admission.sampling_defaults)
        tokenizer = started.engine.tokenizer
        assert tokenizer is not None  # the flag that leaves it out is not offered
        template = _chat_template(arguments.chat_template, tokenizer, started.plan.config.model)
        chat = Chat(started, tokenizer, params, Conversation(arguments.system), template)
        return chat.run()


def _chat_template(wanted: str | None, tokenizer: Tokenizer, model: str) -> str | None:
    """The source or name of the template to use; None: the model's own."""
    if wanted is not None and wanted not in tokenizer.chat_templates:
        try:
            return Path(wanted).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
            raise UsageError(
                f"--chat-template {wanted} is neither a readable file ({error}) nor a template of the model's ({names})"
            ) from error
    if wanted is None and "default" not in tokenizer.chat_templates:
        raise UsageError(
            f"the model {model!r} has no chat template, so it is not known how it takes a conversation; "
            "give one with --chat-template, or use `fleetfoot generate`"
        )
    return wanted


@dataclass(frozen=True, slots=True)
class _Reply:
    text: str
    reason: str | None
    """Why it ended: ``stop``, ``length``, ``abort`` or ``error``."""
    problem: str | None = None
    """What went wrong, with ``error``."""


class Chat:
    """Reads turns, and has the model reply to each."""

    def __init__(
        self,
        started: StartedEngine,
        tokenizer: Tokenizer,
        params: SamplingParams,
        conversation: Conversation,
        template: str | None = None,
    ) -> None:
        self._engine = started.engine
        self._limit = started.max_tokens_in_all
        self._tokenizer, self._params, self._template = tokenizer, params, template
        self.conversation = conversation
        self._title = f"{started.plan.config.model} on {started.plan.device}, runner {started.engine.runner_name}"
        self._replies: list[RequestMetrics] = []
        self._num_requests = 0
        self._last_s = 0.0
        self._is_interactive = sys.stdin is not None and sys.stdin.isatty()

    def run(self) -> int:
        """Until the input ends or /exit. 1: a piped turn was refused or failed."""
        if self._is_interactive:
            _tell(f"{self._title}. /help shows the commands.")
        failed = False
        for line in self._lines():
            if line.startswith("/"):
                if not self._obey(line):
                    break
            elif line.strip():
                failed |= not self._turn(line)
        return 1 if failed and not self._is_interactive else 0

    def _lines(self) -> Iterator[str]:
        if sys.stdin is None:
            return
        if not self._is_interactive:
            for line in sys.stdin:
                yield line.rstrip("\r\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` line editing and a history
        while True:
            try:
                yield _ask("> ")
            except EOFError:  # Ctrl-D
                _tell("")
                return

    # --- commands ---------------------------------------------------------------------------------------------------

    def _obey(self, line: str) -> bool:
        """Do what a line that begins with a slash says. False: end."""
        name, *rest = line.split(maxsplit=1)
        match name:
            case "/exit":
                return False
            case "/help":
                _tell(_COMMANDS)
            case "/reset":
                self.conversation.reset()
                _tell("the conversation is forgotten")
            case "/system":
                self.conversation.system = rest[0].strip() if rest else None
                _tell("the system message is set" if self.conversation.system else "there is no system message now")
            case "/stats":
                _tell(self._stats())
            case unknown:
                _tell(f"unknown command {unknown}; there are /reset, /system, /stats, /help and /exit")
        return True

    def _stats(self) -> str:
        if not self._replies:
            return "no reply yet"
        stats = self._engine.stats()
        return (
            f"last reply: {numbers_line(self._replies[-1:], self._last_s)}\n"
            f"chat: {count(len(self._replies), 'reply', 'replies')}, "
            f"{count(len(self.conversation.turns), 'turn')} remembered, {stats.num_prompt_tokens} tokens in "
            f"({stats.scheduler.prefix_cache_hits} from the prefix cache), {stats.num_generation_tokens} out"
        )

    # --- a turn -----------------------------------------------------------------------------------------------------

    def _turn(self, text: str) -> bool:
        """Ask, and print the reply; a turn without a reply is forgotten. False: it was refused or has failed."""
        self.conversation.ask(text)
        try:
            reply = self._reply(self._prompt())
        except (ValueError, TypeError) as error:  # refused before anything was generated: the chat goes on
            reply = _Reply("", "error", str(error))
        if reply.text or reply.reason in ("stop", "length"):
            self.conversation.answer(reply.text)
        else:
            self.conversation.take_back()
        if reply.problem:
            _tell(f"fleetfoot chat: error: {reply.problem}")
        elif reply.reason == "abort":
            _tell("(stopped)" if reply.text else "(stopped before the first word: the turn is forgotten)")
        return not reply.problem

    def _prompt(self) -> list[int]:
        """Token ids of the conversation, which forgets its beginning where it is too long."""
        reserve = self._limit // 4
        if self._params.max_tokens is not None:
            reserve = min(reserve, self._params.max_tokens)
        prompt = fit(self.conversation, self._tokenize, limit=self._limit, reserve=reserve)
        if prompt.num_dropped:
            _tell(
                f"(the conversation grew too long; forgotten from its beginning: {count(prompt.num_dropped, 'turn')})"
            )
        return prompt.token_ids

    def _tokenize(self, messages: list[ChatMessage]) -> list[int]:
        return self._tokenizer.apply_chat_template_ids(messages, chat_template=self._template)

    def _reply(self, token_ids: list[int]) -> _Reply:
        """Stream one reply to standard output.

        Raises:
            ValueError, TypeError: the engine refuses the request.
        """
        request_id = str(self._num_requests)
        self._num_requests += 1
        room = self._limit - len(token_ids)
        wanted = room if self._params.max_tokens is None else min(room, self._params.max_tokens)
        params = dataclasses.replace(self._params, max_tokens=wanted)
        begin = time.perf_counter()
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)
        parts: list[str] = []
        is_stopping = False
        with StopSignal() as stop:
            while True:
                for output in self._engine.step():
                    completion = output.outputs[0]
                    parts.append(completion.text)
                    print(completion.text, end="", flush=True)
                    if output.finished:
                        print(flush=True)
                        self._replies.append(output.metrics)
                        self._last_s = time.perf_counter() - begin
                        problem = str(completion.stop_reason) if completion.finish_reason == "error" else None
                        return _Reply("".join(parts), completion.finish_reason, problem)
                if stop.is_set and not is_stopping:
                    is_stopping = True
                    self._engine.abort_request(request_id)


def _ask(prompt: str) -> str:
    """A line from the terminal; the prompt goes where it is seen."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def _tell(text: str) -> None:
    """To the user, not to who reads the replies."""
    print(text, file=sys.stderr, flush=True)


COMMAND = Command("chat", "talk with a model", _add_arguments, _run, _EPILOG)
