"""tensor_saver's numbers of layers' passes, for code that counts them. Records have capd's own number (`call`)."""

from __future__ import annotations

from typing import Optional

__all__ = ["TensorIndexManager", "get_tensor_index_manager"]


class TensorIndexManager:
    """Counters for each layer type, layer and operation. All tensors of one pass have the same number."""

    def __init__(self) -> None:
        self.layer_tensor_counters: dict[str, int] = {}

    def get_layer_key(self, layer_type: str, layer_idx: Optional[int], operation: str) -> str:
        """Return the name of the counter."""
        layer = "unknown" if layer_idx is None else f"L{layer_idx}"
        return f"{layer_type}_{layer}_{operation}"

    get_tensor_group_key = get_layer_key

    def get_tensor_index(self, layer_type: str, layer_idx: Optional[int], operation: str) -> int:
        """Return the current number, which begins at 0."""
        return self.layer_tensor_counters.setdefault(self.get_layer_key(layer_type, layer_idx, operation), 0)

    def increment_layer_counter(self, layer_type: str, layer_idx: Optional[int], operation: str) -> None:
        """Increment the number, if it was requested before."""
        key = self.get_layer_key(layer_type, layer_idx, operation)
        if key in self.layer_tensor_counters:
            self.layer_tensor_counters[key] += 1

    def reset_layer_counter(self, layer_type: str, layer_idx: Optional[int], operation: str) -> None:
        """Reset the number to 0."""
        key = self.get_layer_key(layer_type, layer_idx, operation)
        if key in self.layer_tensor_counters:
            self.layer_tensor_counters[key] = 0


_manager = TensorIndexManager()


def get_tensor_index_manager() -> TensorIndexManager:
    """Return the manager of this process."""
    return _manager
