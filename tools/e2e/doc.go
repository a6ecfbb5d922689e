// Package e2e tests the whole system from outside: the published e2b SDK and plain HTTP against a real control plane, agent, VMM
// and guest. On a machine with hardware KVM Torpor runs natively; anywhere else in an emulated host of its own, named "test".
// The system is brought up once for all tests and taken down at the end, and then nothing of it may be left.
//
// With -short everything is skipped. All limits are in limits_test.go.
package e2e
