"""Checkpoints of Hugging Face: config.json, and sharded safetensors with their index, from and into sharded arrays.

A model describes each of its parameters once, as a `Parameter`. Random weights, shardings, loading and saving all
follow from that. Each device reads its own part of each tensor, so a host holds the parts of its devices, and of one
parameter at a time.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

import jax_ep

from .layers import Rope

BLOCK = 128  # rows and columns of a matrix in float8 that share a scale
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # a checkpoint without an index

# Fields of config.json that change nothing that is computed here.
HARMLESS = {
    *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "max_window_layers"),
    *("output_router_logits", "pad_token_id", "router_aux_loss_coef", "torch_dtype"),
    *("max_position_embeddings", "transformers_version", "use_cache"),
}
OURS = {"float8"}  # fields of a Config that are not of config.json
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class JsonConfig:
    """What a model reads of its config.json. Fields have the names there, but for those of `OURS`."""

    rope: Rope
    fixed: ClassVar[Mapping[str, Any]]  # other fields that may be there, if they have this value
    quantization: ClassVar[str | None] = None  # the `quant_method` that the weights may have
    harmless: ClassVar[Collection[str]] = ()  # other fields that change nothing

    @classmethod
    def from_json(cls, path: Path | str) -> Self:
        """Reads the file, or that of a folder.

        Raises:
          ValueError: a field is missing, is not known, or has a value that the model does not compute.
        """
        path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        given = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
        fixed = {"tie_word_embeddings": False, "attention_dropout": 0.0, **cls.fixed}
        for name, value in fixed.items():
            if name in given and given[name] != value:
                raise ValueError(f"{path}: {name} must be {value!r}, got {given[name]!r}")
        method = given.pop("quantization_config", None)
        if method is not None and method.get("quant_method") != cls.quantization:
            raise ValueError(f"{path}: quantization_config.quant_method must be {cls.quantization!r}, got {method}")
        if (size := (method or {}).get("weight_block_size", [BLOCK] * 2)) != [BLOCK] * 2:
            raise ValueError(f"{path}: quantization_config.weight_block_size must be {[BLOCK] * 2}, got {size}")
        rope = {"rope_theta": given.pop("rope_theta", None), **given.pop("rope_scaling", {})}
        rope |= given.pop("rope_parameters", {})
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
        if unknown := rope.keys() - {field.name for field in dataclasses.fields(Rope)}:
            raise ValueError(f"{path}: rope_scaling may have the fields of models.layers.Rope, got {sorted(unknown)}")
        if rope["rope_theta"] is None:
            raise ValueError(f"{path}: rope_theta is missing")
        if rope["rope_type"] == "yarn":
            for name in ("factor", "original_max_position_embeddings"):
                if rope.get(name) is None:
                    raise ValueError(f"{path}: rope_scaling.{name} is missing, which rope_type 'yarn' needs")
        fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in OURS}
        if unknown := given.keys() - fields - fixed.keys() - HARMLESS - set(cls.harmless):
            raise ValueError(f"{path}: the fields {sorted(unknown)} may change the computation, and are unknown")
        values: dict[str, Any] = {name: value for name, value in given.items() if name in fields}
        values["rope"] = Rope(**rope)
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if missing := required - values.keys():
            raise ValueError(f"{path}: the fields {sorted(missing)} are missing")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in OURS}
        rope = {name: value for name, value in dataclasses.asdict(fields.pop("rope")).items() if value is not None}
        theta, scaled = rope.pop("rope_theta"), rope["rope_type"] != "default"
        return {**self.fixed, **fields, "rope_theta": theta, "rope_scaling": rope if scaled else None}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a model, and the tensors of a checkpoint that hold it.

    Attributes:
      name: of the tensor. If it has {layer} or {expert}, which stand for a number, each tensor holds one of them.
      shape: with the layers as first axis if {layer} is in the name, and then the experts, of the whole model.
      swapped: the last two axes of the tensors are in the other order.
      half: the tensor interleaves two arrays by column. 0 takes the even columns, 1 the odd ones.
      first: the number of the first layer.
      experts: the axis after the layers counts experts, and is sharded.
      fixed: the dtype of this array, whatever the model's dtype: float32, or uint8 for the bits of float8 values.
      init: the standard deviation of random values; None is 1 / sqrt(fan in).
    """

    name: str
    shape: tuple[int, ...]
    _: dataclasses.KW_ONLY
    swapped: bool = False
    half: int | None = None
    first: int = 0
    experts: bool = False
    fixed: DTypeLike | None = None
    init: float | Literal["ones"] | None = None

    @property
    def layers(self) -> int | None:
        return self.shape[0] if "{layer}" in self.name else None

    def spec(self, group: jax_ep.Group) -> P:
        """Experts are sharded by number, other matrices along their last axis if the devices divide it."""
        lead = () if self.layers is None else (None,)
        if self.experts:
            return P(*lead, group.axis_name)
        divides = len(self.shape) - len(lead) > 1 and self.shape[-1] % group.size == 0
        return P(*[None] * (len(self.shape) - 1), group.axis_name) if divides else P()

    def names(self, layer: int) -> list[str]:
        """Of the tensors that hold this layer."""
        count = self.shape[self.layers is not None] if "{expert}" in self.name else 1
        return [self.name.format(layer=self.first + layer, expert=expert) for expert in range(count)]

    def read(self, tensors: "Tensors", layer: int, index: Index) -> np.ndarray:
        """A part of this layer: `index` has a slice for each axis after the layers."""
        names = self.names(layer)
        if "{expert}" in self.name:
            return np.stack([self._read_one(tensors, name, index[1:]) for name in names[index[0]]])
        return self._read_one(tensors, names[0], index)

    def _read_one(self, tensors: "Tensors", name: str, index: Index) -> np.ndarray:
        shape = list(self.shape[(self.layers is not None) + ("{expert}" in self.name) :])
        slices = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        if self.half is not None:
            begin, end = slices[-1].start, slices[-1].stop
            shape[-1], slices[-1] = 2 * shape[-1], slice(2 * begin + self.half, 2 * end, 2)
        if self.swapped:
            shape[-2:], slices[-2:] = shape[:-3:-1], slices[:-3:-1]
        found = tensors.read(name, tuple(shape), tuple(slices), raw=self.fixed == jnp.uint8)
        return found.swapaxes(-1, -2) if self.swapped else found

    def write(self, files: dict[str, np.ndarray], layer: int, value: np.ndarray) -> None:
        """The reverse of `read`, of a whole layer."""
        value = value.view(ml_dtypes.float8_e4m3fn) if self.fixed == jnp.uint8 else value
        value = value.swapaxes(-1, -2) if self.swapped else value
        for name, one in zip(self.names(layer), value if "{expert}" in self.name else [value], strict=True):
            if self.half is None:
                files[name] = np.ascontiguousarray(one)
            else:
                both = files.setdefault(name, np.zeros((*one.shape[:-1], 2 * one.shape[-1]), one.dtype))
                both[..., self.half :: 2] = one


class Stack(NamedTuple):
    """Layers of one kind that follow one another: each of their parameters has them as its first axis."""

    number: int
    first: int = 0

    def array(self, name: str, *shape: int, **options: Any) -> Parameter:
        return Parameter(f"model.layers.{{layer}}.{name}", (self.number, *shape), first=self.first, **options)

    def matrix(self, name: str, *shape: int) -> Parameter:
        return self.array(f"{name}.weight", *shape, swapped=True)

    def norm(self, name: str, width: int) -> Parameter:
        return self.array(f"{name}.weight", width, init="ones")


class Tensors:
    """Reads the tensors of a folder of safetensors by name. Float8 and MXFP4 values are returned as floats.

    The headers are read here, because numpy has no float8 that the safetensors library would return.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        index = self.folder / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SINGLE}
        self.header: dict[str, tuple[Path, int, Any]] = {}
        for file in sorted(self.folder / name for name in files):
            size = file.stat().st_size
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                entries = json.loads(opened.read(length)) if 8 + length <= size else {}
            entries.pop("__metadata__", None)
            whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            if size < whole:
                raise ValueError(f"{file}: must have {whole} bytes, got {size}; was it cut off?")
            for name, entry in entries.items():
                self.header[name] = file, 8 + length + entry["data_offsets"][0], entry

    def stored(self, name: str) -> list[str]:
        """The names of what is stored of a tensor: itself and its scales, or its blocks and their scales."""
        found = [name + end for end in ("", "_scale_inv", "_blocks", "_scales") if name + end in self.header]
        if not found:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        return found

    def view(self, name: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """The tensor as it lies in its file, which must have this shape and one of these dtypes."""
        if name not in self.header:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        file, offset, entry = self.header[name]
        if entry["dtype"] not in dtypes:
            raise ValueError(f"{file}: {name} must have one of the dtypes {dtypes}, got {entry['dtype']}")
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"{file}: {name} must have shape {shape}, got {tuple(entry['shape'])}")
        return np.memmap(file, DTYPES.get(entry["dtype"], np.uint8), "r", offset, shape)

    def read(self, name: str, shape: tuple[int, ...], index: Index, *, raw: bool = False) -> np.ndarray:
        """A part of the tensor. With `raw` the bits of float8 values."""
        stored = self.stored(name)
        if name + "_blocks" in stored:
            return self._from_mxfp4(name, shape, index)
        if raw:
            return self.view(name, shape, "F8_E4M3").view(np.uint8)[index]
        part = self.view(name, shape, *DTYPES)[index]
        if part.dtype != ml_dtypes.float8_e4m3fn:
            return part
        scales = self.view(name + "_scale_inv", tuple(-(-size // BLOCK) for size in shape), "F32")
        of_rows, of_columns = (np.arange(size)[where] // BLOCK for size, where in zip(shape, index, strict=True))
        return part.astype(np.float32) * scales[of_rows[:, None], of_columns]

    def _from_mxfp4(self, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """[E, K, N] of blocks [E, N, K / 32, 16], two values in each byte, and their exponents [E, N, K / 32]."""
        experts, k, n = shape
        blocks = self.view(name + "_blocks", (experts, n, k // 32, 16), "U8")[index[0], index[2]]
        exponents = self.view(name + "_scales", (experts, n, k // 32), "U8")[index[0], index[2]].astype(np.int32) - 127
        values = FP4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*blocks.shape[:-1], 32)
        values = np.ldexp(values, exponents[..., None]).reshape(*blocks.shape[:2], k)
        return values.swapaxes(1, 2)[:, index[1]]


Layout = Any  # a pytree of Parameter, as the model's parameters


def shardings(layout: Layout, group: jax_ep.Group) -> Any:
    return jax.tree.map(lambda one: NamedSharding(group.mesh, one.spec(group)), layout)


def random_params(key: jax.Array, layout: Layout, group: jax_ep.Group, dtype: DTypeLike = jnp.float32) -> Any:
    """Normal values, in their shards from the beginning."""
    leaves, tree = jax.tree.flatten(layout)

    def draw(key: jax.Array, one: Parameter) -> jax.Array:
        if one.init == "ones":
            return jnp.ones(one.shape, dtype)
        std = one.shape[-2] ** -0.5 if one.init is None else one.init
        return (std * jax.random.normal(key, one.shape)).astype(one.fixed or dtype)

    def draw_all(key: jax.Array) -> Any:
        return tree.unflatten([draw(k, one) for k, one in zip(jax.random.split(key, len(leaves)), leaves, strict=True)])

    return jax.jit(draw_all, out_shardings=shardings(layout, group))(key)


def load(
    folder: Path | str,
    layout: Layout,
    group: jax_ep.Group,
    dtype: DTypeLike = jnp.bfloat16,
    skip: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The parameters of a checkpoint, in `dtype`, on the devices of the group.

    Args:
      skip: says which tensors are not the model's.

    Raises:
      ValueError: a tensor is missing, has another shape or dtype than it must, or is of no parameter.
    """
    tensors = Tensors(folder)
    leaves = jax.tree.leaves(layout)
    wanted = {
        name for one in leaves for layer in range(1 if one.layers is None else one.layers) for name in one.names(layer)
    }
    stored = {each for name in wanted for each in tensors.stored(name)}
    if unknown := [name for name in tensors.header if name not in stored and not skip(name)]:
        raise ValueError(f"{tensors.folder}: no parameter of the model has the tensors {sorted(unknown)}")
    return jax.tree.map(lambda one: _load_one(one, tensors, NamedSharding(group.mesh, one.spec(group)), dtype), layout)


def _load_one(one: Parameter, tensors: Tensors, sharding: NamedSharding, dtype: DTypeLike) -> jax.Array:
    dtype = np.dtype(one.fixed or dtype)

    if one.layers == 0:
        return jax.device_put(np.zeros(one.shape, dtype), sharding)

    def part(index: Index | None) -> np.ndarray:
        assert index is not None  # JAX's type has None for arrays without axes
        if one.layers is None:
            return one.read(tensors, 0, index).astype(dtype)
        layers = range(*index[0].indices(one.layers))
        return np.stack([one.read(tensors, layer, index[1:]).astype(dtype) for layer in layers])

    return jax.make_array_from_callback(one.shape, sharding, part, dtype=dtype)


def save(folder: Path | str, params: Any, layout: Layout, config: dict[str, Any]) -> None:
    """Writes a checkpoint in the dtype of the parameters: one file for each layer, and one for what is of none.

    All processes call it; the first one writes. It replaces a checkpoint that is in the folder. Weights that were
    loaded from MXFP4 are written as the floats that they became. If some are in float8, config.json says which are not.

    Raises:
      ValueError: the parameters are not those of the layout. Nothing was written.
    """
    from safetensors.numpy import save_file

    folder, writes = Path(folder), jax.process_index() == 0
    described, values = jax.tree.leaves(layout), jax.tree.leaves(params)
    if len(described) != len(values):
        raise ValueError(f"save: params must have the {len(described)} arrays of the model, got {len(values)}")
    pairs = list(zip(described, values, strict=True))
    for one, value in pairs:
        dtypes = [np.dtype(one.fixed)] if one.fixed else [np.dtype(DTYPES[name]) for name in ("F32", "F16", "BF16")]
        if value.shape != one.shape or value.dtype not in dtypes:
            raise ValueError(
                f"save: the parameter of {one.name} must have shape {one.shape} and one of the dtypes "
                f"{[dtype.name for dtype in dtypes]}, got {value.dtype}{list(value.shape)}"
            )
    numbers = sorted({one.first + layer for one, _ in pairs for layer in range(one.layers or 0)})
    weight_map: dict[str, str] = {}
    in_float8: set[str] = set()
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)  # it comes last, so files of two checkpoints are never read as one
    for i, number in enumerate([None, *numbers]):
        tensors: dict[str, np.ndarray] = {}
        for one, value in pairs:
            if number is None and one.layers is None:
                one.write(tensors, 0, multihost_utils.process_allgather(value, tiled=True))
            elif number is not None and one.layers and 0 <= number - one.first < one.layers:
                layer = number - one.first
                one.write(tensors, layer, multihost_utils.process_allgather(value[layer], tiled=True))
        file = f"model-{i + 1:05}-of-{len(numbers) + 1:05}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        in_float8 |= {name for name, value in tensors.items() if value.dtype == ml_dtypes.float8_e4m3fn}
        if writes:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if in_float8:
        modules = {name.removesuffix(".weight") for name in weight_map.keys() - in_float8 if name.endswith(".weight")}
        quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        quantization |= {"weight_block_size": [BLOCK] * 2, "modules_to_not_convert": sorted(modules)}
        config = {**config, "quantization_config": quantization}
    if writes:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        (folder / SINGLE).unlink(missing_ok=True)  # transformers would prefer it to the index
