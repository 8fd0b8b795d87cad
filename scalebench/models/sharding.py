"""Layers of which several workers hold shares: products by columns, then by rows, and attention by heads.

Of two products with what works element by element, or channel by channel, between them,
worker k of t holds the outputs k w/t .. (k + 1) w/t of the first, and the columns of
the second that read them: its output is a summand of the whole one (Megatron-LM, arXiv
1909.08053). A product without a partner is divided by its inputs, where they divide: a
first convolution has the one or three channels of an image. Attention and the
feed-forward part of `nn.TransformerEncoderLayer` are such pairs. All other modules are
held whole by every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from scalebench.cluster.mesh import Mesh
from scalebench.errors import ModelError
from scalebench.models.chain import draws
from scalebench.models.parts import Layer, bounds_of

Product = nn.Linear | nn.Conv2d
# These work on each number alone, on a share as on the whole.
_BY_ELEMENT = (
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.Identity,
    nn.Dropout,
)
# These keep channels apart; Flatten leaves those of a share side by side.
_BY_CHANNEL = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Flatten,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Share(NamedTuple):
    """Part of a tensor of the whole model: `length` places from `start` along `dim`."""

    whole: Tensor
    dim: int
    start: int
    length: int

    def place(self) -> Tensor:
        """Return the view of the whole tensor."""
        return self.whole.detach().narrow(self.dim, self.start, self.length)


class Segment(NamedTuple):
    """Consecutive modules between two sums over the workers of a stage.

    A `divided` one takes the last of the tensors before it, and gives a summand of it;
    another takes and gives all.
    """

    module: nn.Module
    divided: bool


class Shards:
    """Segments of which worker `index` of `degree` holds its shares, and where these lie in the whole model."""

    def __init__(self, degree: int, index: int, name: str) -> None:
        self.degree = degree
        self.index = index
        self.name = name
        self.segments: list[Segment] = []
        self.shares: dict[Tensor, Share] = {}  # by parameter or buffer that was made
        self._kept: list[nn.Module] = []  # consecutive modules that are held whole
        self._whole: list[nn.Module] = []  # products whose inputs do not divide

    def segmented(self, modules: Sequence[nn.Module]) -> list[Segment]:
        """Return the segments of consecutive modules.

        Raises:
            ModelError: a width does not divide, or workers would draw different numbers.
        """
        place = 0
        while place < len(modules):
            module = modules[place]
            self._refuse_drawing(module)
            if isinstance(module, nn.TransformerEncoderLayer):
                self._encoder(module)
            # Not isinstance: a derived class may compute something else.
            elif type(module) in (nn.Linear, nn.Conv2d):
                partner = self._partner(modules, place)
                if partner == place and _width_in(module) % self.degree:
                    self._kept.append(module)
                    self._whole.append(module)
                else:
                    self._pair(modules[place : partner + 1])
                place = partner
            else:
                self._kept.append(module)
            place += 1
        self._close()
        if self._whole and not self.shares:
            self._require(_width_in(self._whole[0]), self._whole[0])
        return self.segments

    def _refuse_drawing(self, module: nn.Module) -> None:
        for each in module.modules():
            if draws(each) or (isinstance(each, nn.Dropout) and each.p > 0):
                raise ModelError(
                    f"model {self.name}: dropout{f' of {each.p:g}' if isinstance(each, nn.Dropout) else ''}: workers "
                    "that hold shares of a layer would draw different numbers; set it to 0"
                )

    def _close(self, *last: nn.Module) -> None:
        if modules := [*self._kept, *last]:
            self.segments.append(Segment(nn.Sequential(*modules), divided=False))
        self._kept = []

    def _partner(self, modules: Sequence[nn.Module], first: int) -> int:
        """Return the place of the product that can take the outputs of the `first` by rows; `first` without one."""
        for place in range(first + 1, len(modules)):
            module = modules[place]
            if type(module) in (nn.Linear, nn.Conv2d):
                return place
            if not isinstance(module, (*_BY_ELEMENT, *_BY_CHANNEL, *_NORMS)):
                break
            # The partner counts on features that lie channel after channel.
            if isinstance(module, nn.Flatten) and module.start_dim != 1:
                break
        return first

    def _pair(self, modules: Sequence[nn.Module]) -> None:
        *before, last = modules
        self._close()
        if not before:
            width = _width_in(last)
            rows = self._rows(last, width)
            # A product without a partner takes its share of an input that all workers
            # have.
            own = Narrow(1 if isinstance(last, nn.Conv2d) else -1, *self._range(width))
            self.segments.append(Segment(nn.Sequential(own, rows), divided=True))
        else:
            inner = [self._columns(before[0])]
            inner += [
                self._norm(each) if isinstance(each, _NORMS) else each
                for each in before[1:]
            ]
            rows = self._rows(last, _width_in(last))
            self.segments.append(Segment(nn.Sequential(*inner, rows), divided=True))
        # Added once, behind the sum: each worker would add it to its summand.
        bias = getattr(last, "bias", None)
        if bias is not None:
            self._kept.append(_Bias(bias, 1 if isinstance(last, nn.Conv2d) else -1))

    def _require(self, width: int, module: nn.Module) -> None:
        if width % self.degree:
            raise ModelError(
                f"model {self.name}: {module} cannot be divided among {self.degree} workers: {self.degree} does not "
                f"divide its width {width}; use a divisor of {width}"
            )
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            raise ModelError(
                f"model {self.name}: {module} cannot be divided among workers: it has groups"
            )

    def _range(self, width: int) -> tuple[int, int]:
        length = width // self.degree
        return self.index * length, length

    # --- modules of shares ------------------------------------------------------------------------------------

    def _parameter(self, share: Share) -> nn.Parameter:
        made = nn.Parameter(
            share.place().clone(), requires_grad=share.whole.requires_grad
        )
        self.shares[made] = share
        return made

    def _columns(self, module: nn.Module) -> nn.Module:
        """Return a product with a share of the outputs."""
        assert isinstance(module, Product)
        width = _width_out(module)
        self._require(width, module)
        start, length = self._range(width)
        weight = self._parameter(Share(module.weight, 0, start, length))
        bias = (
            None
            if module.bias is None
            else self._parameter(Share(module.bias, 0, start, length))
        )
        return _like(module, weight, bias)

    def _rows(self, module: nn.Module, width: int) -> nn.Module:
        """Return a product with a share of the inputs, without its bias."""
        assert isinstance(module, Product)
        self._require(width, module)
        return _like(
            module, self._parameter(Share(module.weight, 1, *self._range(width))), None
        )

    def _norm(self, module: nn.Module) -> nn.Module:
        """Return a batch normalisation of a share of the channels."""
        assert isinstance(module, _NORMS)
        self._require(module.num_features, module)
        start, length = self._range(module.num_features)
        # Statistics of channels are independent, so that a share of them has its own.
        made = type(module)(
            length, module.eps, module.momentum, False, module.track_running_stats
        )
        # Made without parameters, which are shares of the whole ones.
        made.affine = module.affine
        for name in ("weight", "bias"):
            whole = getattr(module, name)
            setattr(
                made,
                name,
                None
                if whole is None
                else self._parameter(Share(whole, 0, start, length)),
            )
        for name in ("running_mean", "running_var"):
            whole = getattr(module, name)
            if whole is not None:
                share = Share(whole, 0, start, length)
                made.register_buffer(name, share.place().clone())
                self.shares[getattr(made, name)] = share
        return made

    def _encoder(self, module: nn.TransformerEncoderLayer) -> None:
        """Divide attention by heads and the feed-forward part by its inner width; what is between is held whole."""
        attention = module.self_attn
        # With keys or values of other widths torch has no joint matrix
        # (`in_proj_weight`).
        heads, width = attention.num_heads, attention.embed_dim
        if (
            heads % self.degree
            or not attention.batch_first
            or attention.in_proj_weight is None
        ):
            raise ModelError(
                f"model {self.name}: attention of {heads} heads cannot be divided among {self.degree} workers; use a "
                f"divisor of {heads}, and batch_first=True"
            )
        inner = module.linear1.out_features
        start, length = self._range(width)

        # Queries, keys and values lie one after the other in one matrix.
        def thirds_of(joined: nn.Parameter) -> list[nn.Parameter]:
            return [
                self._parameter(Share(joined, 0, third * width + start, length))
                for third in range(3)
            ]

        weights = thirds_of(attention.in_proj_weight)
        biases = (
            None
            if attention.in_proj_bias is None
            else thirds_of(attention.in_proj_bias)
        )
        # By rows: the heads of each worker give a summand of the output.
        out = self._parameter(Share(attention.out_proj.weight, 1, start, length))
        feed = nn.Sequential(
            self._columns(module.linear1),
            _Activation(module.activation),
            self._rows(module.linear2, inner),
        )
        first = module.norm_first
        self._close(_Fork(module.norm1 if first else None))
        self.segments.append(
            Segment(SharedHeads(weights, biases, out, heads // self.degree), True)
        )
        # Normalised before attention, or behind the residual sum, as the layer is set.
        after = None if first else module.norm1
        joint = (
            _Join(attention.out_proj.bias, after),
            _Fork(module.norm2 if first else None),
        )
        self.segments.append(Segment(nn.Sequential(*joint), divided=False))
        self.segments.append(Segment(feed, True))
        self._kept.append(_Join(module.linear2.bias, None if first else module.norm2))


def _like(
    module: Product, weight: nn.Parameter, bias: nn.Parameter | None
) -> nn.Module:
    if isinstance(module, nn.Linear):
        return SharedLinear(weight, bias)
    return _Conv(weight, bias, module)


def _width_in(module: nn.Module) -> int:
    assert isinstance(module, Product)
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _width_out(module: nn.Module) -> int:
    assert isinstance(module, Product)
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


class SharedLinear(nn.Module):
    """A product with a share of its outputs, or of its inputs."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class _Conv(nn.Module):
    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, like: nn.Conv2d
    ) -> None:
        super().__init__()
        # `functional.conv2d` pads with zeros only.
        if like.padding_mode != "zeros":
            raise ModelError(
                f"{like} cannot be divided among workers: its padding is no zeros"
            )
        self.weight, self.bias = weight, bias
        self.stride = like.stride
        self.padding = like.padding
        self.dilation = like.dilation

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation
        )


class Narrow(nn.Module):
    """A share of the features, or channels, of an input that every worker has whole."""

    def __init__(self, dim: int, start: int, length: int) -> None:
        super().__init__()
        self.dim = dim
        self.start = start
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, self.start, self.length)


class _Bias(nn.Module):
    """The bias of a product by rows, added once its summands are joined."""

    def __init__(self, bias: nn.Parameter, dim: int) -> None:
        super().__init__()
        self.bias, self.dim = bias, dim

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.bias if self.dim == -1 else self.bias.view(-1, 1, 1))


class SharedHeads(nn.Module):
    """Self-attention of some heads; its output is a summand."""

    def __init__(
        self,
        weights: list[nn.Parameter],
        biases: list[nn.Parameter] | None,
        out: nn.Parameter,
        heads: int,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.out = out
        self.heads = heads
        self.biases = nn.ParameterList(biases) if biases is not None else None

    def forward(self, x: Tensor) -> Tensor:
        samples, places, _ = x.shape
        made = []
        for number, weight in enumerate(self.weights):
            bias = None if self.biases is None else self.biases[number]
            each = functional.linear(x, weight, bias)
            made.append(each.view(samples, places, self.heads, -1).transpose(1, 2))
        query, key, value = made
        joined = (
            functional.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(samples, places, -1)
        )
        return functional.linear(joined, self.out)


class _Activation(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function(x)
        return made


class _Fork(nn.Module):
    """x to (x, norm(x)): the residual, and what the next product takes."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.clone() if self.norm is None else self.norm(x)


class _Join(nn.Module):
    """(x, y) to norm(x + y + bias)."""

    def __init__(self, bias: nn.Parameter | None, norm: nn.Module | None) -> None:
        super().__init__()
        self.bias, self.norm = bias, norm

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        joined = x + (y if self.bias is None else y + self.bias)
        made: Tensor = joined if self.norm is None else self.norm(joined)
        return made


class Held(NamedTuple):
    """What one worker holds of a model: segments of each chunk, and the places of their tensors in the whole model."""

    chunks: list[list[Segment]]
    shares: dict[Tensor, Share]  # by tensor that is a share

    @property
    def model(self) -> nn.Module:
        """One module of all segments, for its parameters and buffers."""
        return nn.Sequential(
            *(segment.module for segments in self.chunks for segment in segments)
        )

    def places(self) -> list[Tensor]:
        """Return where each trainable parameter, then each floating-point buffer, lies in the whole model."""
        model = self.model
        tensors: list[Tensor] = [
            each for each in model.parameters() if each.requires_grad
        ]
        tensors += [each for each in model.buffers() if each.is_floating_point()]
        return [
            self.shares[each].place() if each in self.shares else each
            for each in tensors
        ]


def held_by(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    mesh: Mesh,
    part: int,
    name: str,
    *,
    by_layer: bool = False,
) -> Held:
    """Return what the worker with a part of a model holds: of groups of `sizes` layers those of its stage, or shares.

    Layers that are held whole are one segment, or one each (`by_layer`).

    Raises:
        ModelError: the layers of a model that is called `name` cannot be divided.
    """
    bounds = bounds_of(sizes)
    held = Held([], {})
    for group in mesh.groups_of(part, len(sizes)):
        first, last = bounds[group]
        own = layers[first:last]
        modules = [module for layer in own for module in layer.modules]
        if mesh.tensor == 1:
            pieces = [layer.modules for layer in own] if by_layer else [modules]
            held.chunks.append(
                [Segment(nn.Sequential(*each), divided=False) for each in pieces]
            )
        else:
            shards = Shards(mesh.tensor, part % mesh.tensor, name)
            held.chunks.append(shards.segmented(modules))
            held.shares.update(shards.shares)
    if mesh.tensor > 1 and not any(
        segment.divided for segments in held.chunks for segment in segments
    ):
        raise ModelError(
            f"model {name}: no layer can be divided among {mesh.tensor} workers: only nn.Linear, nn.Conv2d and "
            "nn.TransformerEncoderLayer in a sequence can"
        )
    return held


def require_linear(held: Held, name: str) -> None:
    """Check that torch's parallel styles can divide what a worker holds: they know `nn.Linear` alone.

    Raises:
        ModelError: a convolution, or a batch normalisation between two products, is divided.
    """
    for segments in held.chunks:
        for module in (
            inner
            for segment in segments
            if segment.divided
            for inner in segment.module.modules()
        ):
            if isinstance(module, (_Conv, *_NORMS)):
                what = (
                    "a convolution"
                    if isinstance(module, _Conv)
                    else "batch normalisation between two products"
                )
                raise ModelError(
                    f"model {name}: torch.distributed.tensor.parallel has no style for {what}; use strategy tensor, "
                    "which divides it"
                )


def sharing_degrees(
    divide: Callable[[int, int, int], object], layers: int, workers: int
) -> list[tuple[int, ...]]:
    """Return for each of consecutive layers the numbers of `workers` that can share it: 1, and divisors of `workers`.

    `divide(first, last, degree)` raises ModelError if layers `first` to `last`
    (exclusive) cannot be shared as one. A degree by which two neighbours are divided
    apart, but not together, is left out for the first of them: consecutive layers of
    one degree are divided as one.
    """

    def divides(first: int, last: int, degree: int) -> bool:
        try:
            divide(first, last, degree)
        except ModelError:
            return False
        return True

    divisors = [degree for degree in range(2, workers + 1) if workers % degree == 0]
    # First each layer by itself, then pairs: two neighbours of one degree are divided
    # as one.
    alone = [
        [degree for degree in divisors if divides(place, place + 1, degree)]
        for place in range(layers)
    ]
    found = []
    behind = [*alone[1:], []]  # of the layer behind each; none behind the last
    for place, (own, following) in enumerate(zip(alone, behind, strict=True)):
        joined = [
            degree
            for degree in own
            if degree not in following or divides(place, place + 2, degree)
        ]
        found.append((1, *joined))
    return found


def sharing_degrees_of(
    layers: Sequence[Layer], workers: int, name: str
) -> list[tuple[int, ...]]:
    """Return the same of the layers of a model that is called `name`."""

    def divide(first: int, last: int, degree: int) -> Held:
        return held_by(layers[first:last], [last - first], Mesh(tensor=degree), 0, name)

    return sharing_degrees(divide, len(layers), workers)


def called(module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a segment's module gives for one tensor, or for the pair of a residual and a sum."""
    made = module(inputs[0] if len(inputs) == 1 else tuple(inputs))
    return [made] if isinstance(made, Tensor) else list(made)
