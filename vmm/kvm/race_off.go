//go:build !race

package kvm

const raceEnabled = false
