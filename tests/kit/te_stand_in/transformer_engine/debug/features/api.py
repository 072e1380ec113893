"""The namespace that TransformerEngine registers: what it asks, and whom it asks."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.registry import Registry


class TEConfigAPIMapper(BaseConfigAPIMapper):
    def parse_config_and_api(self, config: dict[str, Any], **kwargs: Any) -> tuple[bool, Any]:
        found = self._process_tensor_config(dict(config), kwargs["tensor_name"])
        if found is None:
            return False, None
        found.pop("enabled", None)
        return True, found


class _Defaults:
    def inspect_tensor_enabled(self, config: Any, layer_name: str, **_: Any) -> tuple[bool, None]:
        return False, None

    def inspect_tensor(self, config: Any, layer_name: str, **_: Any) -> None:
        return None


@Registry.register_namespace_api(namespace="transformer_engine")
class TransformerEngineAPI(BaseNamespaceAPI):
    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = _Defaults()
        self._cacheable_api_kwargs_map = {
            "inspect_tensor": ["tensor_name"],
            "inspect_tensor_enabled": ["tensor_name", "iteration"],
        }

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return True

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        assert "tensor_name" in kwargs

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> Any:
        return feature_obj.parse_config_and_api(config, **kwargs)

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        assert ret is None or isinstance(ret, (bool, tuple))

    def call_feature(self, call: Any, feat_config: Any, layer_name: str, **kwargs: Any) -> Any:
        return call(feat_config, layer_name, **kwargs)
