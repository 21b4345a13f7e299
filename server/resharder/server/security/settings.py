"""Settings under `security` in the daemon's configuration."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from resharder.server.holding.tls import DaemonTls, NodeTls
from resharder.server.options import OptionalPath
from resharder.server.security.roles import Roles


class Security(BaseModel):
    """Settings of access control. At least one of `client_ca` and `tokens` is required."""

    model_config = ConfigDict(extra="forbid")

    certificate: Path = Field(description="PEM: the daemon's certificate, and those between it and its authority")
    key: Path = Field(description="PEM: its key")
    client_ca: OptionalPath = Field(None, description="PEM: the authorities of clients' certificates; without it, tokens alone")
    tokens: OptionalPath = Field(None, description="lines of NAME sha256:HEX")
    roles: dict[str, list[str]] = Field(description="roles of each name")

    @field_validator("roles")
    @classmethod
    def _read(cls, roles: dict[str, list[str]]) -> dict[str, list[str]]:
        Roles(roles)
        return roles

    @model_validator(mode="after")
    def _identified(self) -> "Security":
        if self.client_ca is None and self.tokens is None:
            raise ValueError("no caller can be identified: set client_ca, tokens or both")
        return self


def node_tls(security: Security | None) -> NodeTls | None:
    """Return the certificates with which the daemon calls nodes; None without security."""
    if security is None:
        return None
    own, authority = security.certificate, security.client_ca
    return DaemonTls(authority or own, own, security.key, verified=authority is not None)
