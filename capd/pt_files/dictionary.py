"""The dictionary in each of tensor_saver's files: made from a record, and converted back to one.

  {"tensor": torch.Tensor, "tensor_info": {shape, dtype, device, requires_grad, is_leaf, min, max, mean, std},
   "metadata": {layer_type, operation, quant_type, tensor_name, layer_idx, phase, component, rank, sample_idx,
                iteration, save_time, …fields that the caller added}}

A file that capd wrote names its record under metadata["capd"] (`Origin`), and the reader uses only this entry. For any
other file the reader takes the metadata first, then the file's name, then the name of its directory.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.pt_files.names import NameParts, Scheme
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.statistics import saved_statistics
from capd.store.read.series import Record, Series
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import MAX_METADATA_NBYTES

__all__ = [
    "TENSOR_NAMES",
    "Capture",
    "Naming",
    "TensorNames",
    "capture_of",
    "dictionary_of",
    "foreign_capture",
    "standard_metadata",
]

T = TypeVar("T")
TensorNames = Literal["tensor_saver", "capd"]
TENSOR_NAMES: tuple[str, ...] = get_args(TensorNames)

_ORIGIN_FORMAT = 1
_SAVE_TIME = "%Y-%m-%d %H:%M:%S"
# tensor_saver calls the tensors that enter and leave a Linear's backward its input and output.
_SAVER_BACKWARD = {"grad_output": "input", "grad_input": "output"}
_ADDED_LATER = {
    "A": {"phase", "component", "rank", "sample_idx", "iteration"},
    "B": {"rank", "sample_idx", "iteration"},
}
_STANDARD = (
    "layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "phase", "component", "rank", "sample_idx",
    "iteration", "save_time",
)  # fmt: skip
_MAX_DEPTH, _MAX_VALUES = 64, 10_000
# A rank may send at most this many bytes of metadata, too.
_MAX_ATTRIBUTES_NBYTES = 64 << 10


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record from which a file was made, in metadata["capd"]. `series` and `record` are its place in run `run`."""

    format: int
    run: str
    series: str
    record: int
    key: Key
    moment: dict[str, Any]
    attributes: dict[str, Any]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Naming:
    """The naming of exported files: scheme, tensor names (tensor_saver's or capd's), number of the first layer."""

    scheme: Scheme = "C"
    tensor_names: TensorNames = "tensor_saver"
    layer_base: int = 0

    def layer(self, key: Key) -> int | None:
        """Return the number of the layer as files show it."""
        return None if key.layer is None else key.layer + self.layer_base

    def shown(self, key: Key) -> Key:
        """Return the key with the tensor's name as files show it."""
        backward = key.operation == "backward" and "linear" in (key.layer_type, key.component)
        if self.tensor_names == "tensor_saver" and backward and key.tensor_name in _SAVER_BACKWARD:
            return msgspec.structs.replace(key, tensor_name=_SAVER_BACKWARD[key.tensor_name])
        return key


def dictionary_of(
    run_id: str, series: Series, record: Record, bits: NDArray[np.generic], tensor: Any, naming: Naming
) -> dict[str, Any]:
    """Return the dictionary for a record. All values except the tensor are plain.

    The caller's metadata are next to the standard fields. If a caller's field has the name of a standard field, only
    the copy under "capd" keeps it.
    """
    return {
        "tensor": tensor,
        "tensor_info": {
            "shape": list(record.shape),
            "dtype": f"torch.{series.dtype}",
            "device": record.device,
            "requires_grad": record.requires_grad,
            "is_leaf": record.is_leaf,
            **saved_statistics(bits, series.dtype, record.committed_stats),
        },
        "metadata": {
            **record.metadata,
            **standard_metadata(series.key, record, naming),
            "capd": _origin(run_id, series, record),
        },
    }


def standard_metadata(key: Key, moment: Moment | Record, naming: Naming) -> dict[str, Any]:
    """Return the standard fields of the metadata, as the naming scheme has them."""
    shown = naming.shown(key)
    standard = {
        "layer_type": shown.layer_type or "unknown",
        "operation": shown.operation,
        "quant_type": shown.quant_type,
        "tensor_name": shown.tensor_name,
        "layer_idx": naming.layer(shown),
        "phase": shown.phase or "unknown",
        "component": shown.component or "unknown",
        "rank": shown.rank,
        "sample_idx": moment.sample_idx or 0,
        "iteration": moment.iteration,
        "save_time": time.strftime(_SAVE_TIME, time.localtime(moment.time_ns // 1_000_000_000)),
    }
    left_out = _ADDED_LATER.get(naming.scheme, set())
    return {name: value for name, value in standard.items() if name not in left_out}


def _origin(run_id: str, series: Series, record: Record) -> dict[str, Any]:
    origin = Origin(
        format=_ORIGIN_FORMAT,
        run=run_id,
        series=series.path,
        record=record.index,
        key=series.key,
        moment={name: getattr(record, name) for name in Moment.__struct_fields__},
        attributes=record.attributes,
        metadata=record.metadata,
    )
    plain: dict[str, Any] = msgspec.to_builtins(origin)
    return plain


@dataclass(frozen=True, slots=True)
class Capture:
    """A file as a future record: all parts except the tensor."""

    key: Key
    moment: Moment
    device: str
    requires_grad: bool
    is_leaf: bool
    metadata: str
    attributes: dict[str, Any]


def capture_of(found: Any, name: NameParts | None, directory: str, layer_base: int) -> Capture:
    """Return the record of a file.

    Args:
        found: The object that torch.load returned.
        name: The parts of the file's name, None if it has no known scheme.
        directory: The name of the file's directory.
        layer_base: The number of the first layer in files that capd did not write.

    Raises:
        BadTensorFile: If `found` is not a dictionary of tensor_saver's kind.
    """
    import torch

    if not isinstance(found, dict) or not isinstance(found.get("tensor"), torch.Tensor):
        raise BadTensorFile('it holds no dictionary with a "tensor", so it is not from tensor_saver')
    info, metadata = found.get("tensor_info", {}), found.get("metadata", {})
    if not isinstance(info, dict) or not isinstance(metadata, dict):
        raise BadTensorFile('its "tensor_info" or "metadata" is no dictionary')
    if "capd" in metadata:
        origin = _read_origin(metadata["capd"])
        key, moment = origin.key, _moment(origin.moment)
        attributes, own = origin.attributes, origin.metadata
    else:
        said = {"quant_type": directory, **(name.fields if name else {}), **_standard(metadata)}
        key, moment = _key(said, layer_base), _moment(_when(said, metadata, name))
        attributes, own = {}, {str(k): v for k, v in metadata.items() if k not in _STANDARD}
    attributes, own = _plain(attributes, _MAX_ATTRIBUTES_NBYTES), _plain(own, MAX_METADATA_NBYTES)
    device = str(info.get("device", "cpu"))[:64]
    _must_be_writable(key, device, attributes)
    return Capture(
        key,
        moment,
        device,
        bool(info.get("requires_grad", False)),
        bool(info.get("is_leaf", False)),
        json.dumps(own, ensure_ascii=False) if own else "",
        attributes,
    )


def foreign_capture(
    key: Mapping[str, Any],
    moment: Mapping[str, Any],
    attributes: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Capture:
    """Return the record of a tensor in a file of another tool.

    Args:
        key: The fields of its `Key`.
        moment: The known fields of its `Moment`.
        attributes: The attributes of its series.
        metadata: What else the file says, of any depth and type.

    Raises:
        BadTensorFile: The fields do not name a record, or are too large.
    """
    named, when = _converted(dict(key), Key), _moment(moment)
    kept, own = _plain(dict(attributes), _MAX_ATTRIBUTES_NBYTES), _plain(dict(metadata), MAX_METADATA_NBYTES)
    _must_be_writable(named, kept)
    return Capture(named, when, "cpu", False, False, json.dumps(own, ensure_ascii=False) if own else "", kept)


def _read_origin(plain: Any) -> Origin:
    if isinstance(plain, dict) and isinstance(plain.get("format"), int) and plain["format"] > _ORIGIN_FORMAT:
        raise BadTensorFile(
            f'its metadata["capd"] has format {plain["format"]}, newer than {_ORIGIN_FORMAT}: use a newer capd'
        )
    return _converted(plain, Origin)


def _standard(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata fields that are set. An unset field must not hide the value in the file's name."""
    names = (*_STANDARD, "batch_idx", "sequence_idx")
    return {name: metadata[name] for name in names if metadata.get(name) is not None}


def _key(said: Mapping[str, Any], layer_base: int) -> Key:
    layer = said.get("layer_idx")
    if isinstance(layer, int) and layer < layer_base:
        advice = f", below --layer-base {layer_base}; import it with --layer-base 0" if layer >= 0 else ""
        raise BadTensorFile(f"its layer is {layer}{advice}")
    fields = {
        "quant_type": said["quant_type"],
        "rank": said.get("rank", 0),
        "layer": layer - layer_base if isinstance(layer, int) else layer,
        "tensor_name": said.get("tensor_name", ""),
        **{
            field: said[field] for field in ("phase", "layer_type", "operation", "component") if field in said
        },
    }
    if not fields["tensor_name"]:
        raise BadTensorFile("neither its metadata nor its name says which tensor it is")
    return _converted(fields, Key)


def _when(said: Mapping[str, Any], metadata: Mapping[str, Any], name: NameParts | None) -> dict[str, Any]:
    when = {
        field: said[field]
        for field in ("iteration", "sample_idx", "batch_idx", "sequence_idx")
        if field in said
    }
    if "group" in said:
        when["call"] = said["group"]
    for text, form in (
        (metadata.get("save_time"), _SAVE_TIME),
        (name.stamp if name else None, "%Y%m%d_%H%M%S"),
    ):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            when.setdefault("time_ns", int(time.mktime(time.strptime(text, form))) * 1_000_000_000)  # type: ignore[arg-type]
    return when


def _moment(fields: Mapping[str, Any]) -> Moment:
    unknown = fields.keys() - set(Moment.__struct_fields__)
    if unknown:
        raise BadTensorFile(f"its moment has the unknown field {str(min(unknown))[:40]!r}")
    defaults = zip(Moment.__struct_fields__, Moment.__struct_defaults__, strict=True)
    return _converted([fields.get(field, default) for field, default in defaults], Moment)


def _converted(plain: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(plain, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadTensorFile(f"its metadata do not name a record: {error}") from None


def _must_be_writable(*parts: Any) -> None:
    try:
        msgspec.msgpack.encode(parts)
    except (ValueError, OverflowError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise BadTensorFile(f"its metadata cannot be kept: {error}") from None


def _plain(fields: dict[str, Any], most_nbytes: int) -> dict[str, Any]:
    """Return the fields as JSON values. Raises BadTensorFile if they are too large or nested too deep."""
    plain: dict[str, Any] = _Plain().value(fields, 0)
    try:
        nbytes = len(json.dumps(plain, ensure_ascii=False).encode())
    except ValueError as error:
        # The text has invalid Unicode, or an integer has thousands of digits.
        raise BadTensorFile(f"its metadata cannot be kept as JSON: {error}") from None
    if nbytes > most_nbytes:
        raise BadTensorFile(
            f"its metadata take {nbytes} bytes, more than the {most_nbytes} that a record may have"
        )
    return plain


class _Plain:
    """A converter of callers' metadata to JSON values. Values that JSON lacks (dtypes, tensors) become their text."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def value(self, found: Any, depth: int) -> Any:
        self._left -= 1
        # A few bytes of pickle can nest lists to any depth.
        if self._left < 0 or depth > _MAX_DEPTH:
            raise BadTensorFile("its metadata hold too many values, or are nested too deep")
        if isinstance(found, dict):
            return {str(key)[:4096]: self.value(inner, depth + 1) for key, inner in found.items()}
        if isinstance(found, (list, tuple)):
            return [self.value(inner, depth + 1) for inner in found]
        if found is None or isinstance(found, (bool, int, str)):
            return found
        if isinstance(found, float) and found - found == 0:
            return found
        return str(found)[:4096]
