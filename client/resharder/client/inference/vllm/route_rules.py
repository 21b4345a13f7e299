"""vLLM's routes: those that change the engine, and those that do not use the model.

vLLM adds routes with `VLLM_SERVER_DEV_MODE`, `--tokens-only` and other options. The table covers 0.26, 0.28,
0.32 and 0.33; a test compares it with the routes of the installed vLLM. With the weight transfer backend `resharder`, the
routes of `weight_transfer.py` pass.
"""

from resharder.client.inference.control.gate import Routes
from resharder.client.inference.control.route_rules import PUBLISH, Handling, RouteRule, Rules

ROUTES = Routes(
    ungated=frozenset(
        {
            "/metrics",
            "/metrics/",
            "/version",
            "/load",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/is_paused",
            "/is_sleeping",
            "/server_info",
        }
    ),
    health=frozenset({"/health", "/ping"}),
    stored="/v1/responses/",
)
"""For the gate, which also stops routes of other plugins and of later vLLM releases."""

_HARMLESS, _COORDINATED = RouteRule(Handling.HARMLESS), RouteRule(Handling.COORDINATED)
_WEIGHTS = RouteRule(Handling.REFUSED, PUBLISH)
_UNSUPPORTED = RouteRule(Handling.REFUSED, "restart the server with the other configuration")

_INFERENCE = (
    "/classify",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/detokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/ping",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/decisions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
)
_REQUESTS_AND_CACHES = (
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
)

RULES: Rules = {
    **{("POST", path): _HARMLESS for path in (*_INFERENCE, *_REQUESTS_AND_CACHES)},
    ("POST", "/sleep"): _COORDINATED,
    ("POST", "/wake_up"): _COORDINATED,
    ("POST", "/release_kv_cache_memory"): RouteRule(Handling.REFUSED, "use `resharder sleep --server SERVER`"),
    ("POST", "/pause"): RouteRule(Handling.REFUSED, "use `resharder drain --server SERVER`"),
    ("POST", "/resume"): RouteRule(Handling.REFUSED, "use `resharder resume --server SERVER`"),
    ("POST", "/init_weight_transfer_engine"): _WEIGHTS,
    ("POST", "/shutdown_weight_transfer_engine"): _WEIGHTS,
    ("POST", "/start_weight_update"): _WEIGHTS,
    ("POST", "/start_draft_weight_update"): _WEIGHTS,
    ("POST", "/update_weights"): _WEIGHTS,
    ("POST", "/finish_weight_update"): _WEIGHTS,
    ("POST", "/update_weight_version"): _WEIGHTS,
    ("POST", "/weight_checker"): RouteRule(Handling.REFUSED, PUBLISH, "action", frozenset({"checksum", "compare"})),
    ("POST", "/collective_rpc"): RouteRule(
        Handling.REFUSED, PUBLISH, "method", frozenset({"resharder_describe", "resharder_fingerprint"})
    ),
    ("POST", "/v1/load_lora_adapter"): _UNSUPPORTED,
    ("POST", "/v1/unload_lora_adapter"): _UNSUPPORTED,
    ("POST", "/adapters"): _UNSUPPORTED,
    ("DELETE", "/adapters/{adapter_name}"): _UNSUPPORTED,
    ("POST", "/scale_elastic_ep"): _UNSUPPORTED,
    ("POST", "/fault_tolerance/apply"): _UNSUPPORTED,
}
"""All routes of vLLM except GET."""
