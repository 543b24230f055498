"""The calls and commands of pooling engines, and the examples of docs/pooling.md."""

import asyncio
import json
import re
import runpy
import shlex
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tests.helpers.commands import CommandRunner
from tests.helpers.pooling import PAIR, PROMPTS, SETTINGS, TEXTS, ids, save_reward_model, save_with_tokenizer, states
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from fleetfoot import LLM, AsyncLLM, PoolingParams, SamplingParams
from fleetfoot.plan import resolve
from fleetfoot.utils.validation import FieldError
from fleetfoot.weights.hub import resolve_model


async def only(outputs: AsyncGenerator[Any, None]) -> Any:
    (output,) = [output async for output in outputs]
    return output


def test_the_asynchronous_engine(tmp_path: Path) -> None:
    model, settings = save_with_tokenizer(tmp_path, "llama", AutoModel), SETTINGS | {"skip_tokenizer_init": False}
    with LLM(tmp_path, **settings) as llm:
        alone = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        cosines = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]

    async def check(engine: AsyncLLM) -> None:
        params = PoolingParams(use_activation=False)
        output = await only(engine.encode(ids(PROMPTS)[2], params, "pooled", lora_request=None))
        torch.testing.assert_close(output.outputs.data, states(model, PROMPTS[2])[-1], rtol=1e-4, atol=1e-5)
        many = await asyncio.gather(*(only(engine.embed(TEXTS[i % 3], None, f"e{i}")) for i in range(60)))
        assert [output.outputs.embedding for output in many] == [
            pytest.approx(alone[i % 3], abs=1e-5) for i in range(60)
        ]
        pairs = await asyncio.gather(*(only(engine.score(TEXTS[0], text)) for text in TEXTS))
        assert [output.outputs.score for output in pairs] == pytest.approx(cosines, abs=1e-5)
        tasks = [asyncio.ensure_future(only(engine.embed([5] * 100, None, f"c{i}"))) for i in range(40)]
        await asyncio.sleep(0)  # their requests are queued
        for task in tasks[::2]:
            task.cancel()
        await engine.abort([f"c{i}" for i in range(1, 40, 4)])
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended[::2])
        for index, output in enumerate(ended[1::2]):
            is_whole = output.finish_reason == "stop" and len(output.outputs.embedding) == 48
            assert is_whole or (index % 2 == 0 and (output.finish_reason, output.outputs.embedding) == ("abort", []))
        await engine.check_integrity()
        for outputs, error, message in (
            (engine.generate("a", SamplingParams(), "g"), TypeError, "SamplingParams was given, and this engine pools"),
            (engine.classify("a"), ValueError, "AsyncLLM.encode needs the task 'classify'; this model has embed"),
            (engine.embed("a", lora_request=1), TypeError, "unknown keyword 'lora_request'"),
            (engine.embed([9999]), ValueError, r"prompt_token_ids\[0\] is 9999"),
            (engine.score("a", {"prompt_token_ids": [9999]}), ValueError, r"prompt_token_ids\[0\] is 9999"),
            (engine.score("a", ["b"]), TypeError, r"data_2 is \['b'\]; it must be a text"),
        ):
            with pytest.raises(error, match=message):
                await only(outputs)

    async def start() -> None:
        async with AsyncLLM(str(tmp_path), **settings | {"num_gpu_blocks_override": 40}) as engine:
            await check(engine)
        async with AsyncLLM(str(tmp_path), **settings, runner="generate", load_format="dummy") as engine:
            with pytest.raises(ValueError, match=r"AsyncLLM.encode needs a model for pooling, and this one generates"):
                await only(engine.embed("a"))
            with pytest.raises(TypeError, match=r"pooling_params were given, and this engine generates"):
                await only(engine.generate("a", PoolingParams(), "g"))

    asyncio.run(start())


def test_commands(tmp_path: Path, run: CommandRunner) -> None:
    save_with_tokenizer(tmp_path / "embeds", "llama", AutoModel, is_matryoshka=True)
    save_with_tokenizer(tmp_path / "scores", "llama", AutoModelForSequenceClassification, num_labels=1)
    embeds, scores = str(tmp_path / "embeds"), str(tmp_path / "scores")
    run.flags = ("--device", "cpu", "--dtype", "float32")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt_token_ids": [5, 6]}\n')
    flags = ("--prompts-file", str(tmp_path / "p.jsonl"), "--dimensions", "8")
    lines = [json.loads(line) for line in run("embed", embeds, *flags).splitlines()]
    assert [(line["prompt"], len(line["embedding"])) for line in lines] == [("one", 8), (None, 8)]
    tokens = run.json("embed", embeds, *flags, "--tokens", "--json")
    assert [torch.tensor(line["embedding"]).shape for line in tokens] == [
        (len(t["prompt_token_ids"]), 8) for t in tokens
    ]
    (tmp_path / "q.jsonl").write_text('{"query": "a", "document": ["b", "c"]}\n')
    (tmp_path / "pair.jinja").write_text(PAIR)
    pairs = ("--pairs-file", str(tmp_path / "q.jsonl"), "--query", "one", "--document", "two")
    scored = run.json("score", scores, *pairs, "--json", "--chat-template", str(tmp_path / "pair.jinja"))
    assert [(line["query"], line["document"]) for line in scored] == [("one", "two"), ("a", "b"), ("a", "c")]
    with LLM(scores, **SETTINGS | {"skip_tokenizer_init": False}) as llm:
        expected = llm.score(["one", "a", "a"], ["two", "b", "c"], chat_template=PAIR, use_tqdm=False)
        assert [line["score"] for line in scored] == [pytest.approx(o.outputs.score, abs=1e-6) for o in expected]
        raw = llm.classify("one", pooling_params=PoolingParams(activation=False), use_tqdm=False)[0].outputs.probs
    assert run.json("classify", scores, "--prompt", "one", "--no-use-activation")["probs"] == pytest.approx(
        raw, abs=1e-6
    )
    assert len(run.json("reward", scores, "--prompt", "one")["rewards"]) > 1
    (tmp_path / "q.jsonl").write_text('{"query": "a", "document": "b"}\n{"query": "a", "document": [3]}\n')
    for argv, message in (
        (("score", embeds, *pairs), "q.jsonl, line 2: document is 3; it must be a text"),
        (("score", embeds, "--query", "a"), "--query and --document go together"),
        (("score", embeds), "there are no pairs; give --query and --document"),
        (
            ("embed", embeds, "--prompt", "a", "--dimensions", "0"),
            "dimensions must be an integer of at least 1, or not set",
        ),
        (("embed", embeds, "--prompt", "a", "--dimensions", "49"), "dimensions is 49, and embeddings have 48 elements"),
        (("classify", embeds, "--prompt", "a"), "needs the task 'classify'; this model has embed"),
        (("generate", embeds, "--prompt", "a"), "SamplingParams was given, and this engine pools"),
    ):
        assert message in run.refused(*argv)


PAGE = (Path(__file__).parents[2] / "docs" / "pooling.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, str] = dict(re.findall(r"<!-- example: (\w+) -->\n```(?:python|sh)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints in place of those that docs/pooling.md names."""
    names = ("Qwen/Qwen3-Embedding-0.6B", "my/cross-encoder", "Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen2.5-Math-PRM-7B")
    folders = {name: tmp_path_factory.mktemp("hub") for name in names}
    base = tmp_path_factory.mktemp("base")
    save_with_tokenizer(base, "qwen3", AutoModel)
    modules = [Transformer(str(base)), Pooling(48, "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "Query: "}).save(str(folders[names[0]]))
    save_with_tokenizer(folders[names[1]], "llama", AutoModelForSequenceClassification, num_labels=1)
    save_with_tokenizer(folders[names[2]], "qwen3", AutoModelForCausalLM, tokens=("no",))
    save_reward_model(folders[names[3]], "Qwen2ForProcessRewardModel", 2)
    return folders


@pytest.fixture
def examples(hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(name: str, *args: Any, **options: Any) -> Path:
        return hub.get(name) or resolve_model(name, *args, **options)

    monkeypatch.setattr(resolve, "resolve_model", find)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("embed", r"48 32\n"), ("score", r"\[0\.\d+(, 0\.\d+){3}\] \[0\.\d+\]\n"), ("rerank", r"0\.\d+\n"),
        ("reward", r"torch.Size\(\[\d+, 2\]\)\n"), ("asyncio", r"torch.Size\(\[48\]\)\n-?0\.\d+\n"),
    ],
)  # fmt: skip
def test_examples_of_the_page(example: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLES[example], {})
    assert re.fullmatch(printed, capsys.readouterr().out)


@pytest.mark.usefixtures("examples")
def test_a_model_without_the_task_is_refused_before_it_is_loaded(
    run: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetfoot.llm.LLM", mock.Mock(side_effect=AssertionError("it is loaded")))
    for call, task in (("classify", "classify"), ("reward", "token_classify")):
        run(call, "Qwen/Qwen3-Embedding-0.6B", "--prompt", "one", code=2)
        message = f"{call} needs the task {task!r}; this model has embed, token_embed, score"
        assert f"{message}: use fleetfoot embed or score" in run.err


@pytest.mark.parametrize("settings", [{"task": "classify"}, {"task": "reward"}, {"convert": "classify"}])
def test_a_decoder_without_a_head_is_refused_by_its_configuration(settings: dict[str, str]) -> None:
    with pytest.raises(FieldError, match="this model has embed, token_embed, score") as refused:
        LLM(**settings)
    assert [(refused.value.field, refused.value.value)] == list(settings.items())


@pytest.mark.usefixtures("examples")
def test_commands_of_the_page(run: CommandRunner) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "one"}')
    Path("pairs.jsonl").write_text('{"query": "one", "document": ["two", "three"]}')
    printed = []
    for line in EXAMPLES["commands"].splitlines():
        out = run(*shlex.split(line)[1:])
        printed.append(len(json.loads(out)) if "--json" in line else [*json.loads(out.splitlines()[0])][:2])
    assert printed == [
        ["prompt", "embedding"], ["prompt", "embedding"], ["query", "document"], 2, ["prompt", "probs"],
        ["prompt", "rewards"],
    ]  # fmt: skip


SCRIPT = """
from argparse import Namespace
from vllm import LLM, EngineArgs, PoolingParams
from vllm.config import AttentionConfig
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

def parse_args():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="some/model", runner="pooling", enforce_eager=True, trust_remote_code=True)
    return parser.parse_args()

def main(args: Namespace):
    if current_platform.is_rocm():
        args.attention_config = AttentionConfig(backend=AttentionBackendEnum.FLEX_ATTENTION)
    args.hf_overrides = OVERRIDES
    llm = LLM(**vars(args))
    prompts = ["Hello, my name is", "The capital of France is"]
    for output in CALL:
        print(output.outputs)

if __name__ == "__main__":
    main(parse_args())
"""
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "overrides", "call", "printed"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", {}, "llm.embed(prompts)", r"EmbeddingOutput\(embedding=\[.*\]\)"),
        ("Qwen/Qwen3-Embedding-0.6B", {"matryoshka_dimensions": [4]},
         "llm.embed(prompts, pooling_params=PoolingParams(dimensions=4))",
         r"EmbeddingOutput\(embedding=\[(\S+ ?){4}\]\)"),
        ("my/cross-encoder", {}, "llm.classify(prompts)", r"ClassificationOutput\(probs=\[0\.\d+\]\)"),
        ("my/cross-encoder", {}, "llm.score(prompts[0], prompts)", r"ScoringOutput\(score=0\.\d+\)"),
        ("Qwen/Qwen3-Reranker-0.6B", RERANKER, f"llm.score(prompts, prompts, chat_template={PAIR!r})",
         r"ScoringOutput\(score=0\.\d+\)"),
        ("Qwen/Qwen2.5-Math-PRM-7B", {}, "llm.reward(prompts)", r"PoolingOutput\(data=tensor\(\[(.|\n)*\]\)\)"),
        ("Qwen/Qwen2.5-Math-PRM-7B", {}, "llm.encode(prompts, pooling_task='token_classify')", r"PoolingOutput(.|\n)*"),
    ],
)  # fmt: skip
def test_scripts_of_vllm(
    model: str, overrides: dict[str, Any], call: str, printed: str, hub: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the import changed."""
    script = SCRIPT.replace("OVERRIDES", repr(overrides)).replace("CALL", call).replace("vllm", "fleetfoot")
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(
        sys, "argv", ["script.py", "--model", str(hub[model]), "--max-model-len", "64", "--device", "cpu"]
    )
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert re.fullmatch(f"{printed}\n{printed}\n", capsys.readouterr().out)
