# vLLM's own image with the plugin. From the repository's root:
#     docker build -f deploy/containers/vllm.Dockerfile -t resharder-vllm:0.2.0 .
# README.md names the versions of vLLM that are tested; `--build-arg VLLM=IMAGE` takes another one. `docker buildx imagetools inspect IMAGE`
# prints an image's digest.
ARG VLLM=vllm/vllm-openai:v0.26.0@sha256:ffb2d59b1c059a5bd8d781320c9f5189de8293693b7d95da54befddaa54abf52
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

FROM ${VLLM}
# What vLLM's image has stays as it is: a dependency that would change it ends the build.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/constraints.txt \
    && wheel="$(ls /wheels/*.whl)" \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[vllm]" \
    && rm /tmp/constraints.txt
RUN groupadd --gid 10001 resharder && useradd --uid 10001 --gid 10001 --create-home resharder
ENV VLLM_PLUGINS=resharder
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
