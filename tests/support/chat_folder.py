"""A folder with a small tokenizer and a chat template, as a worker's record names one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tokens import folders

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chat_folder(folder: Path) -> Path:
    """Write a byte-level tokenizer with ChatML's template; an answer ends with `<|im_end|>`."""
    folders.write("byte_level", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
