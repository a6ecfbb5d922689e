#!/bin/sh
# Runs every fuzz target of the repository for a time each, and fails at the end if one of them did: fuzz.sh 60s
# What a target finds stays in its testdata/fuzz. Minimising is kept short, or large inputs take up all of the time.
set -eu

targets=0 failed=
for package in $(go list ./...); do
	for target in $(go test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "$package $target"
		targets=$((targets + 1))
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$1" -fuzzminimizetime 1s "$package" || failed="$failed $package.$target"
	done
done
echo "$targets fuzz targets, $1 each; failed:${failed:- none}"
[ -z "$failed" ]
