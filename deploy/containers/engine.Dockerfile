# The engine's own image with the plugin. From the repository's root, for vLLM and for SGLang:
#     docker build -f deploy/containers/engine.Dockerfile -t resharder-vllm:0.2.0 .
#     docker build -f deploy/containers/engine.Dockerfile -t resharder-sglang:0.2.0 --build-arg EXTRA=sglang --build-arg ENGINE=lmsysorg/sglang:v0.5.23 .
# README.md names the releases that are tested; ENGINE takes the image of another one. `docker buildx imagetools inspect IMAGE` prints
# an image's digest, to be written behind its name.
ARG ENGINE=vllm/vllm-openai:v0.26.0@sha256:ffb2d59b1c059a5bd8d781320c9f5189de8293693b7d95da54befddaa54abf52
ARG PYTHON=python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${PYTHON} AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY converters converters
COPY server server
COPY client client
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${ENGINE}
ARG EXTRA=vllm
# What the engine's image has stays as it is: a dependency that would change it ends the build.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/constraints.txt \
    && wheel="$(ls /wheels/*.whl)" \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[${EXTRA}]" \
    && rm /tmp/constraints.txt
RUN groupadd --gid 10001 resharder && useradd --uid 10001 --gid 10001 --create-home resharder
ENV VLLM_PLUGINS=resharder SGLANG_PLUGINS=resharder
USER 10001:10001
EXPOSE 8000
