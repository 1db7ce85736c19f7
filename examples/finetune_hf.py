"""Fine-tune a Hugging Face model: from its folder through the tree and back to a plain model.

python examples/finetune_hf.py             # a small Llama with random weights, on bytes of text
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import treeprop_ray.core.vision  # noqa: F401  (torchvision for transformers, beside any torch)
from treeprop_ray import Fitted, TreeNetwork, config, fit
from treeprop_ray.data import load


def save_small(folder: Path, layers: int) -> None:
    """A Llama over bytes; in real life the folder is that of a model of yours."""
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)


def main(windows: int = 1024, layers: int = 7, **settings: Any) -> Fitted:
    data = load(config.load(["experiment=text_small", "data.length=64"]))  # Python's help texts
    x, y = data.train.x[:windows].long(), data.train.y[:windows].long()  # the next byte
    held = data.test.x[:64].long(), data.test.y[:64].long()
    with TemporaryDirectory() as folder:
        given, out = Path(folder) / "given", Path(folder) / "out"
        save_small(given, layers)
        network = TreeNetwork.from_pretrained(given)
        words = {"epochs": 2, "batch": 16, "lr": 3e-3, "sigma": 0.005, "clip": 1.0, **settings}
        result = fit(network, x, y, validation=held, **words)
        for name, score in result.scores["validation"].items():
            print(f"{name:8} {score['loss']:.3f} nats per byte of the held-out text")
        network.save_pretrained(out)  # or one of the short paths: path="spine-1"
        plain = transformers.AutoModelForCausalLM.from_pretrained(out).eval()  # without us
        with torch.no_grad():
            same = torch.equal(plain(held[0]).logits, network.eval()(held[0]))
        print(f"{type(plain).__name__} of transformers gives {'equal' if same else 'other'} logits")
        assert same
    return result


if __name__ == "__main__":
    main()
