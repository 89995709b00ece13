# SMG, a router that speaks the engine contract of Ostinato's workers and OpenAI's API to clients, as it comes from Python's registry.
#   docker build -f deploy/router.Dockerfile -t ostinato-router:1.13.0 deploy
# tests/program/fleet.rs runs the same version in front of two workers.

FROM python:3.13.1-slim
RUN pip install --no-cache-dir smg==1.13.0 smg-grpc-proto==0.4.28 \
    && useradd --system --uid 10002 router
USER 10002
EXPOSE 30000 29000
ENTRYPOINT ["smg", "launch"]
