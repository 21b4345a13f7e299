# The daemon, and the operator's command beside it. From the repository's root:
#     docker build -f deploy/containers/daemon.Dockerfile -t resharderd:0.2.0 .
# Pinned: `docker buildx imagetools inspect python:3.11-slim-bookworm` prints the newest one's digest.
ARG PYTHON=python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${PYTHON} AS build
ARG EXTRAS=server,client,archive
RUN python -m venv /opt/resharder
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY converters converters
COPY server server
COPY client client
COPY deploy deploy
RUN /opt/resharder/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM ${PYTHON}
# Of one number with the vLLM image's: only the same user shares memory with the daemon.
RUN groupadd --gid 10001 resharder && useradd --uid 10001 --gid 10001 --create-home resharder
COPY --from=build /opt/resharder /opt/resharder
ENV PATH=/opt/resharder/bin:$PATH \
    NUMBA_CACHE_DIR=/tmp/numba \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 7677 7678 7679
# It drains on SIGTERM: give it drain_seconds and a little more before SIGKILL.
STOPSIGNAL SIGTERM
ENTRYPOINT ["resharderd"]
