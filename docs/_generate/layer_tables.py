"""The layer tables scalebench/models/layer_tables/*.csv: `python docs/_generate/layer_tables.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from docs._generate import architectures as published
from docs._generate.amoebanet import amoebanet_d
from scalebench.models.layer_counting import count_layers
from scalebench.models.layers import LayerTable
from scalebench.models.zoo.layers import write_layers

FOLDER = Path("scalebench/models/layer_tables")
_IMAGE, _RESNET = (
    (3, 224, 224),
    "He et al., CVPR 2016 (arXiv 1512.03385), table 1, stride in the 3 x 3 convolutions",
)
_INCEPTION = "Szegedy et al., CVPR 2016 (arXiv 1512.00567), table 1"
_BERT = "Devlin et al., NAACL 2019 (arXiv 1810.04805); 512 tokens, encoder and pooler, scores of attention in memory"

ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "resnet50": (partial(published.resnet, (3, 4, 6, 3)), _IMAGE, _RESNET),
    "resnet101": (partial(published.resnet, (3, 4, 23, 3)), _IMAGE, _RESNET),
    "resnet152": (partial(published.resnet, (3, 8, 36, 3)), _IMAGE, _RESNET),
    "vgg16": (
        published.vgg16,
        _IMAGE,
        "Simonyan and Zisserman, ICLR 2015 (arXiv 1409.1556), table 1, configuration D",
    ),
    "alexnet": (
        published.alexnet,
        _IMAGE,
        "Krizhevsky, 2014 (arXiv 1404.5997), the one-column network",
    ),
    "inception_v3": (
        published.InceptionV3,
        (3, 299, 299),
        f"{_INCEPTION}, with the auxiliary classifier",
    ),
    "inception_v3_plain": (
        partial(published.InceptionV3, auxiliary=False),
        (3, 299, 299),
        f"{_INCEPTION}, without the auxiliary classifier",
    ),
    "bert_base": (partial(published.Bert, 12, 768, 12), (512,), _BERT),
    "bert_large": (partial(published.Bert, 24, 1024, 16), (512,), _BERT),
    "vit_b16": (
        published.VisionTransformer,
        _IMAGE,
        "Dosovitskiy et al., ICLR 2021 (arXiv 2010.11929), ViT-B/16",
    ),
    "gpt2": (
        published.Gpt2,
        (1024,),
        "Radford et al., 2019, 12 layers of width 768; 1024 tokens, scores of attention in memory",
    ),
    "amoebanet_d": (
        partial(amoebanet_d, 18, 256),
        _IMAGE,
        "Real et al., AAAI 2019 (arXiv 1802.01548), AmoebaNet-D (18, 256) as measured by torchgpipe",
    ),
}


def counted(name: str) -> LayerTable:
    """Return the layer table of a published architecture."""
    build, shape, source = ARCHITECTURES[name]
    with torch.device("meta"):
        model = build()
    dtype = torch.float32 if len(shape) == 3 else torch.int64
    return count_layers(
        model, torch.empty(2, *shape, dtype=dtype, device="meta"), name, source
    )


if __name__ == "__main__":
    for each in ARCHITECTURES:
        (FOLDER / f"{each}.csv").write_text(write_layers(counted(each)))
