"""Prompts and their continuations on a terminal or in a file, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from fleetfoot.config import env
from fleetfoot.records.outputs import CompletionOutput, RequestOutput

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class TextPrinter:
    """Prints outputs in order, however they arrive: one sequence as its text is made, later ones once it has ended.

    Args:
        file: where to.
        request_ids: of all requests, in order.
        num_copies: sequences of each request.
        show_prompt: the text of a request's prompt.
        show_tokens: the text of tokens where the engine makes none, without a tokenizer for instance; else None.
    """

    def __init__(
        self,
        file: TextIO,
        request_ids: list[str],
        num_copies: int,
        show_prompt: Callable[[RequestOutput], str],
        show_tokens: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._file = file
        self._order = [(request_id, index) for request_id in request_ids for index in range(num_copies)]
        self._num_requests, self._num_copies = len(request_ids), num_copies
        self._show_prompt, self._show_tokens = show_prompt, show_tokens
        self._held: dict[tuple[str, int], list[str]] = {key: [] for key in self._order}
        self._prompts: dict[str, str] = {}
        self._ended: set[tuple[str, int]] = set()
        self._current = 0
        self._is_open = False  # whether the current sequence's prompt is printed
        self._bold = (BOLD, PLAIN) if file.isatty() and not env.no_color() else ("", "")

    def take(self, output: RequestOutput) -> None:
        """Print what is new, or hold it back until its turn comes.

        Args:
            output: a delta, or a request's only output.
        """
        if output.request_id not in self._prompts:
            self._prompts[output.request_id] = self._show_prompt(output)
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            if key not in self._ended:
                self._held[key].append(self._text(completion))
                if completion.finished():
                    self._ended.add(key)
        self._print()

    def _text(self, completion: CompletionOutput) -> str:
        return completion.text if self._show_tokens is None else self._show_tokens(completion.token_ids)

    def _print(self) -> None:
        while self._current < len(self._order):
            key = self._order[self._current]
            if key[0] not in self._prompts:
                break
            if not self._is_open:
                self._begin(key[0])
            self._file.write("".join(self._held[key]))
            self._held[key].clear()
            if key not in self._ended:
                break
            self._file.write("\n")
            self._current += 1
            self._is_open = False
        self._file.flush()

    def _begin(self, request_id: str) -> None:
        self._is_open = True
        if len(self._order) > 1:
            request, copy = divmod(self._current, self._num_copies)
            places = [f"prompt {request + 1} of {self._num_requests}"] if self._num_requests > 1 else []
            places += [f"output {copy + 1} of {self._num_copies}"] if self._num_copies > 1 else []
            self._file.write("\n" * bool(self._current) + f"--- {', '.join(places)} ---\n")
        bold, plain = self._bold
        self._file.write(f"{bold}{self._prompts[request_id]}{plain}")
