"""A feature of nvdlfw-inspect, which TransformerEngine asks at each of its products: hands the tensors on to capd.

    import capd_client, nvdlfw_inspect.api as debug_api
    debug_api.initialize(config_file="capture.yaml", feature_dirs=[..., capd_client.te_features()])

Loaded by nvdlfw-inspect, never by capd: the only file that needs it, and TransformerEngine.
"""

from __future__ import annotations

from typing import Any, Optional

from nvdlfw_inspect.registry import Registry, api_method
from transformer_engine.debug.features.api import TEConfigAPIMapper

from capd_client.integrations import te_inspection

te_inspection.begin()


@Registry.register_feature(namespace="transformer_engine")
class CapdCapture(TEConfigAPIMapper):  # type: ignore[misc]  # untyped, and absent where types are checked
    """Captures what TransformerEngine multiplies. Settings as those of DumpTensors, both of them on by default.

    tensors, or tensors_struct: any of activation, weight, output, gradient, wgrad, dgrad. high_precision_tensor: the
    tensor before the cast. quantized_tensor: payload and scales. Which steps, ranks and rows: capd's own settings.
    """

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int]:
        """Whether this iteration is captured, and the next one in which to ask again."""
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
