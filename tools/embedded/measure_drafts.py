"""How many drafts the engine accepts for held-out stories, by method, number of drafts and temperature.

Usage: `python tools/embedded/measure_drafts.py [--documents 40]`; prints a table in Markdown. Each request is the
beginning of a story, and goes on to the story's end. The numbers are counts: they do not depend on the machine's speed.
"""

import argparse
from pathlib import Path
from typing import Any

from data import make_data

from fleetfoot import LLM, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.scheduler.stats import DraftStats

PROMPT_TOKENS = 12
MAX_TOKENS = 256
DRAFT_MODEL = Path("tests/assets/story-draft")
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "draft_model": {"method": "draft_model", "model": str(DRAFT_MODEL)},
    "ngram": {"method": "ngram"},
}


def make_prompts(num_documents: int) -> list[dict[str, list[int]]]:
    """The first tokens of held-out documents."""
    data = make_data(embedded_model_path() / "tokenizer.json", "held-out", num_documents, 1)
    return [{"prompt_token_ids": data.ids[start : start + PROMPT_TOKENS].tolist()} for start in data.starts]


def measure(method: str, num_drafts: int, temperature: float, prompts: list[dict[str, list[int]]]) -> DraftStats:
    """What becomes of drafts for these prompts."""
    config = {**METHODS[method], "num_speculative_tokens": num_drafts, "adaptive": False}
    llm = LLM(device="cpu", max_num_seqs=len(prompts), speculative_config=config)
    try:
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, detokenize=False)
            for seed in range(len(prompts))
        ]
        llm.generate(prompts, params, use_tqdm=False)
        return llm.llm_engine.stats().drafts
    finally:
        llm.shutdown()


def row(method: str, num_drafts: int, temperature: float, drafts: DraftStats) -> str:
    """A line of the table."""
    places = ", ".join(f"{100 * rate:.0f}" for rate in drafts.acceptance_rates)
    return (
        f"| `{method}` | {num_drafts} | {temperature:g} | {drafts.mean_acceptance_length:.2f} | "
        f"{100 * drafts.acceptance_rate:.0f} % | {places} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=40)
    arguments = parser.parse_args()
    prompts = make_prompts(arguments.documents)
    print("| method | k | temperature | tokens a step | drafts accepted | of each place, in % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in METHODS:
        for temperature in (0.0, 1.0):
            for num_drafts in (1, 2, 3, 4):
                drafts = measure(method, num_drafts, temperature, prompts)
                print(row(method, num_drafts, temperature, drafts), flush=True)


if __name__ == "__main__":
    main()
