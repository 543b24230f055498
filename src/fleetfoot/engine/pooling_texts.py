"""How texts become the prompts of a pooling engine: prompts of sentence-transformers, templates, pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfoot.config.pooling import Pooling
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.utils.validation import FieldError

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PoolingTexts:
    """Tokenizes texts and pairs of texts.

    As `sentence-transformers` does, the tokenizer cuts a text at its end and keeps the special tokens there.
    """

    pooling: Pooling
    tokenizer: Tokenizer
    max_length: int
    """Tokens of the longest prompt."""

    def tokenize(self, text: str, params: PoolingParams) -> list[int]:
        """Token ids of one text. Raises ValueError: there is no prompt of the given name."""
        prompt = self._prompt(params)
        if not self.pooling.uses_chat_template:
            return self.encode(prompt + text, params)
        return self.encode(self._render([("user", text)], prompt), params, add_special_tokens=False)

    def tokenize_pair(self, first: str, second: str, params: PoolingParams, template: str | None = None) -> list[int]:
        """Token ids of a query and a document, for a model that reads both.

        ``template``: a chat template that has roles ``query`` and ``document``; else the model's own way joins them.
        """
        prompt, roles = self._prompt(params), [("query", first), ("document", second)]
        if template is not None:
            return self.encode(self._render(roles, prompt, chat_template=template), params)
        if self.pooling.uses_chat_template:
            return self.encode(self._render(roles, prompt), params, add_special_tokens=False)
        if self.pooling.use_sep_token:
            return self.encode(prompt + first, params, text_pair=second)
        return self.encode(prompt + first + second, params)

    def _prompt(self, params: PoolingParams) -> str:
        prompts, name = dict(self.pooling.prompts), params.prompt_name or self.pooling.default_prompt
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none (they are in config_sentence_transformers.json)"
            raise FieldError("prompt_name", f"is {name!r}; the model's prompts are {known}", name)
        return prompts[name]

    def pair_messages(self, first: str, second: str, params: PoolingParams) -> list[dict[str, str]]:
        """The conversation from which the template of a request makes a prompt for `encode`."""
        return _messages([("query", first), ("document", second)], self._prompt(params))

    def _render(self, roles: list[tuple[str, str]], prompt: str, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(_messages(roles, prompt), tokenize=False, **options)

    def encode(self, text: str, params: PoolingParams, **options: Any) -> list[int]:
        """Token ids of a whole prompt."""
        if (limit := params.truncate_prompt_tokens) is not None:
            options |= {"truncation": True, "max_length": self.max_length if limit == -1 else limit}
        return self.tokenizer.encode(text, **options)


def _messages(roles: list[tuple[str, str]], prompt: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in [*([("system", prompt)] if prompt else []), *roles]]
