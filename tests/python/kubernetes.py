"""Holds the objects of a file against Kubernetes' own schemas; prints each that keeps to them."""

import sys

import kubernetes_validate
import yaml

with open(sys.argv[1]) as file:
    for object in yaml.safe_load_all(file):
        # Strict: a field that is not known is an error, as a misspelt one would otherwise be ignored.
        kubernetes_validate.validate(object, sys.argv[2], strict=True)
        print(object["kind"], object["metadata"]["name"])
