"""Trains the byte-level BPE tokenizer that all embedded models share, and writes it in Hugging Face's format.

The result depends on the corpus and on nothing else. Usage: `python tools/embedded/tokenizer.py --out DIR`.
"""

import argparse
import json
import re
from pathlib import Path

from corpus import document
from story_chat import BEGIN, END, PAD, ROLE_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
TRAINING_DOCUMENTS = 20_000
SPECIAL_TOKENS = (BEGIN, END, PAD, ROLE_TOKENS["user"], ROLE_TOKENS["assistant"], ROLE_TOKENS["system"])
FILES = ("tokenizer.json", "tokenizer_config.json")

# Renders what `story_chat.render` renders. A chat ends each turn with the end token and starts with the begin token.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('the roles are system, user, assistant and tool, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] | replace('tool', 'user') + '|>' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(num_documents: int = TRAINING_DOCUMENTS) -> Tokenizer:
    """The tokenizer of the embedded models; plain text gets a `<|begin|>` in front, as Llama's tokenizers do.

    All 256 bytes are in the alphabet, so every UTF-8 text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    special = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    texts = (special.sub("\n", document(f"tokenizer {seed}").text) for seed in range(num_documents))
    tokenizer.train_from_iterator(texts, trainer)
    begin_id = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B:1", special_tokens=[(BEGIN, begin_id)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLE_TOKENS.values()),
        "model_max_length": MAX_LENGTH,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tokenizer's files to")
    folder = parser.parse_args().out
    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder)
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
