# One image for every process: docker run IMAGE web, or another name from the Procfile.

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
RUN python -m venv /venv
COPY requirements-observability.txt ./
RUN /venv/bin/pip install --require-hashes -r requirements-observability.txt
COPY . .
RUN /venv/bin/python -m compileall -q .
# The documentation as a site, which the service shows at /docs.
RUN python -m venv /mkdocs \
    && /mkdocs/bin/pip install --require-hashes -r requirements-docs.txt \
    && NO_MKDOCS_2_WARNING=1 /mkdocs/bin/mkdocs build --strict

FROM python:3.11-slim-bookworm
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 VAR_DIR=/state PORT=8000
WORKDIR /app
# /state holds the files of attachments and tools, unless an object storage holds them. Everything else is read-only.
RUN groupadd --gid 10001 service \
    && useradd --uid 10001 --gid service --no-create-home --home-dir /state service \
    && install --directory --owner=service --group=service --mode=0750 /state
COPY --from=build /venv /venv
COPY --from=build /app /app
USER 10001:10001
VOLUME /state
EXPOSE 8000
# For the processes that serve HTTP. Workers have no port; /metrics reports on them.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/livez', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "config.serve.procfile"]
CMD ["web"]
