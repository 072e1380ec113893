"""The feature of nvdlfw-inspect that passes TransformerEngine's operands to capd.

    import capd_client, nvdlfw_inspect.api as debug_api
    debug_api.initialize(config_file="capture.yaml", feature_dirs=[..., capd_client.te_features()])

TransformerEngine asks the feature at each of its products. nvdlfw-inspect loads this file, and capd never does. It
is the only file that needs nvdlfw-inspect and TransformerEngine.
"""

from __future__ import annotations

from typing import Any, Optional

from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

from capd_client.integrations import te_inspection

te_inspection.begin()


@Registry.register_feature(namespace="transformer_engine")
class CapdCapture(TEConfigAPIMapper):  # type: ignore[misc]
    """Captures the operands of TransformerEngine's products.

    The settings are those of DumpTensors, both on by default:

        tensors, or tensors_struct: any of activation, weight, output, gradient, wgrad, dgrad
        high_precision_tensor: the tensor before the cast
        quantized_tensor: payload and scales

    capd's own settings decide which steps, ranks and rows are captured.
    """

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """Return whether this iteration is captured, and the next iteration in which to ask again."""
        return te_inspection.wants(), iteration + 1

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: Optional[Any],
        rowwise_quantized_tensor: Optional[Any] = None,
        columnwise_quantized_tensor: Optional[Any] = None,
        quantizer: Optional[Any] = None,
        tp_size: int = 1,
    ) -> None:
        """Capture one tensor of one layer."""
        offered = [tensor] if config.get("high_precision_tensor", True) else []
        if config.get("quantized_tensor", True):
            offered += [rowwise_quantized_tensor, columnwise_quantized_tensor]
        te_inspection.inspected(layer_name, tensor_name, offered, tp_size)
