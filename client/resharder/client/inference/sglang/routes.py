"""SGLang's routes: those that change the engine, and those that do not use the model; read against 0.5.17 and 0.5.23.

A test compares the table with the routes of the installed SGLang.
"""

from resharder.client.inference.control.gate import Routes
from resharder.client.inference.control.route_rules import PUBLISH, Handling, RouteRule, Rules

ROUTES = Routes(
    ungated=frozenset(
        {
            "/metrics",
            "/metrics/",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/ready",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/get_server_info",
            "/v1/loads",
        }
    ),
    health=frozenset({"/health", "/ping"}),
    stored="/v1/responses/",
)
"""For the gate."""

_HARMLESS = RouteRule(Handling.HARMLESS)
_WEIGHTS = RouteRule(Handling.REFUSED, PUBLISH)
_SLEEP = RouteRule(Handling.REFUSED, "use `resharder sleep --server SERVER` and `resharder wake --server SERVER`")
_PAUSE = RouteRule(Handling.REFUSED, "use `resharder drain --server SERVER` and `resharder resume --server SERVER`")
_UNSUPPORTED = RouteRule(Handling.REFUSED, "restart the server with the other configuration")

_INFERENCE = (
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/classify",
    "/encode",
    "/generate",
    "/invocations",
    "/parse_function_call",
    "/separate_reasoning",
    "/v1/audio/transcriptions",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/decisions",
    "/v1/detokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v1/tokenize",
    "/tokenize",
    "/vertex_generate",
)
_REQUESTS_AND_CACHES = (
    "/abort_request",
    "/add_external_corpus",
    "/clear_hicache_storage_backend",
    "/close_session",
    "/configure_logging",
    "/dump_expert_distribution_record",
    "/flush_cache",
    "/freeze_gc",
    "/open_session",
    "/remove_external_corpus",
    "/set_trace_level",
    "/slow_down",
    "/start_expert_distribution_record",
    "/start_profile",
    "/stop_expert_distribution_record",
    "/stop_profile",
    "/hicache/storage-backend/clear",
)
_WRITES = (
    "/begin_weight_update",
    "/destroy_weights_update_group",
    "/end_weight_update",
    "/init_weights_send_group_for_remote_instance",
    "/init_weights_update_group",
    "/send_weights_to_remote_instance",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weights_from_tensor",
)

RULES: Rules = {
    **{("POST", path): _HARMLESS for path in (*_INFERENCE, *_REQUESTS_AND_CACHES)},
    **{("PUT", path): _HARMLESS for path in ("/classify", "/encode", "/generate", "/v1/rerank")},
    **{("POST", path): _WEIGHTS for path in _WRITES},
    **{(verb, path): _SLEEP for verb in ("GET", "POST") for path in ("/release_memory_occupation", "/resume_memory_occupation")},
    ("POST", "/pause_generation"): _PAUSE,
    ("POST", "/continue_generation"): _PAUSE,
    ("GET", "/weights_checker"): RouteRule(Handling.REFUSED, PUBLISH),
    ("POST", "/weights_checker"): RouteRule(Handling.REFUSED, PUBLISH, "action", frozenset({"checksum", "compare"})),
    ("POST", "/get_weights_by_name"): _HARMLESS,
    ("POST", "/load_lora_adapter"): _UNSUPPORTED,
    ("POST", "/load_lora_adapter_from_tensors"): _UNSUPPORTED,
    ("POST", "/unload_lora_adapter"): _UNSUPPORTED,
    ("POST", "/pd_role_switch"): _UNSUPPORTED,
    ("POST", "/scale_elastic_ep"): _UNSUPPORTED,
    ("POST", "/set_internal_state"): _UNSUPPORTED,
    ("PUT", "/set_internal_state"): _UNSUPPORTED,
    ("PUT", "/hicache/storage-backend"): _UNSUPPORTED,
    ("DELETE", "/hicache/storage-backend"): _UNSUPPORTED,
}
"""All routes of SGLang that change the engine, and the others that are not GET."""
