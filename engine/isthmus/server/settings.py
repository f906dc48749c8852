"""What a server is told beside what its engine is told."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.pooling_params import LAST
from isthmus.server.auth import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of the server's certificate chain and of its key (None: the key is in the chain's file)."""

    certfile: str
    keyfile: str | None = None
    keyfile_password: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """served_model_names: what the model answers to; the first is what it calls itself.  api_keys: () asks for none.
    body_timeout_s: in which a request's body must have come.  request_timeout_s: in which it must be answered, None =
    no limit.  allowed_origins: of web pages that may use the server, "*" is every one.  chat_template: Jinja text that
    takes the place of the model's own.  use_generation_config: sampling parameters that a request leaves out are those
    of the model's generation_config.json, not those of SamplingParams.  otlp_endpoint: URL of a collector
    that takes traces.  console: whether there is a page at /.  pooling: of
    embeddings, as in PoolingParams.  tool_call_parser, reasoning_parser: names of
    parsers, "auto" for what is evident from the chat template, or "none".
    """

    served_model_names: tuple[str, ...]
    api_keys: tuple[ApiKey, ...] = ()
    tls: Tls | None = None
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    use_generation_config: bool = True
    metrics_prefix: str = "isthmus"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    pooling: str = LAST
    otlp_endpoint: str | None = None
    console: bool = True

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
