#!/bin/bash
git apply "$(dirname "$0")/fix.patch"
