# vLLM's own image with the plugin. From the repository's root:
#     docker build -f deploy/containers/vllm.Dockerfile -t resharder-vllm:0.1.0 .
# README.md names the versions of vLLM that are tested.
ARG VLLM=0.26.0
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY converters converters
COPY server server
COPY client client
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v${VLLM}
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
