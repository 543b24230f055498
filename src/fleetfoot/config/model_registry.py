"""Architectures of users and of plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, KeysView
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from fleetfoot.config.architectures import ARCHITECTURES, LLAMA_DEFAULTS, Architecture, llama_traits, no_windows
from fleetfoot.config.json_fields import Fields
from fleetfoot.utils.plugins import entry_points

logger = logging.getLogger(__name__)

PLUGINS = "fleetfoot.general_plugins"
"""The entry points of packages; each one is a function without arguments."""
_SETTABLE = {item.name for item in fields_of(Architecture)} - {"model", "model_class", "default_on_v2"}


class ModelRegistry:
    """vLLM's class of this name. docs/models.md has an example."""

    @staticmethod
    def register_model(
        model_arch: str,
        model_cls: type[Any] | str,
        *,
        traits: Callable[[Fields], dict[str, Any]] | None = None,
        **entry: Any,
    ) -> None:
        """Let a `CausalLM` of your own run the models of an architecture.

        Its ``config.json`` has Llama's fields, or those of the architecture of this name that it replaces. Model Runner
        V1 is its default, and its layers are not fused. Worker processes import the class by its name.

        Args:
            model_arch: the name in ``architectures`` of ``config.json``.
            model_cls: the class, or ``module:class``, which is imported when a model is built.
            traits: `Fields` of ``config.json`` -> further fields of `ModelConfig`, such as ``extras``; see
                `Architecture.traits`.
            entry: other fields of `Architecture`; ``defaults`` are added to those that there are.

        Raises:
            TypeError, ValueError: an argument is of another kind; names it.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise TypeError(f"model_arch is {model_arch!r}; it must be a name in architectures of config.json")
        path = f"{model_cls.__module__}:{model_cls.__qualname__}" if isinstance(model_cls, type) else model_cls
        if not isinstance(path, str) or not all(path.partition(":")):
            raise ValueError(f"model_cls is {model_cls!r}; it must be a class, or its name as 'module:class'")
        if unknown := ", ".join(sorted(entry.keys() - _SETTABLE)):
            raise TypeError(f"register_model has no {unknown}; it takes traits, {', '.join(sorted(_SETTABLE))}")
        known = ARCHITECTURES.get(model_arch)
        if known is not None and known.model != path:
            logger.warning("%s of %s takes the place of %s", path, model_arch, known.model)
        stem = model_arch.removesuffix("ForCausalLM")
        base = known or Architecture(stem.lower(), f"{stem}Model", path, LLAMA_DEFAULTS, llama_traits, no_windows)

        def all_traits(fields: Fields) -> dict[str, Any]:
            added = {} if traits is None else traits(fields)
            before = base.traits(fields)
            layer = {**before.get("layer", {}), "unfusible": f"a registered class, {path}", **added.get("layer", {})}
            return {**before, **added, "layer": layer}

        entry |= {"defaults": {**base.defaults, **entry.get("defaults", {})}, "traits": all_traits}
        found = model_cls if isinstance(model_cls, type) else None
        ARCHITECTURES[model_arch] = replace(base, model=path, model_class=found, default_on_v2=False, **entry)

    @staticmethod
    def get_supported_archs() -> KeysView[str]:
        """The names in ``architectures`` of ``config.json`` that are supported."""
        return ARCHITECTURES.keys()


def load_general_plugins() -> None:
    """Call the functions that installed packages list as PLUGINS. As in vLLM, every process of an engine does, and may
    do so several times. Raises ValueError: one cannot be imported."""
    for plugin in entry_points(group=PLUGINS):
        try:
            register = plugin.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"the plugin {plugin.name!r} ({plugin.value}) cannot be imported: {error}") from error
        register()
