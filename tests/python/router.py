"""Parses arguments with the router's own parser and prints the result as JSON."""

import json
import sys

from smg.launch_router import parse_router_args

read = parse_router_args(sys.argv[1:])
names = ["host", "port", "policy", "worker_urls", "prometheus_port", "enable_trace", "otlp_traces_endpoint",
         "service_discovery", "selector", "service_discovery_port", "service_discovery_namespace"]
print(json.dumps({name: getattr(read, name) for name in names}))
