"""Validates the objects of a YAML file against Kubernetes' own schemas; prints each valid object."""

import sys

import kubernetes_validate
import yaml

with open(sys.argv[1]) as file:
    for object in yaml.safe_load_all(file):
        # Strict: an unknown field is an error; otherwise a misspelled field would be ignored.
        kubernetes_validate.validate(object, sys.argv[2], strict=True)
        print(object["kind"], object["metadata"]["name"])
