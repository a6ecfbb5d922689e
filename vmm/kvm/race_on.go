//go:build race

package kvm

const raceEnabled = true
