// Package machine assembles a virtual machine from the parts in the other vmm packages, runs it, and saves and restores it.
//
//	Boot ──────────────┐                     ┌── Save ──┐
//	                   ├──> running ──Pause──> paused <─┘
//	Restore ───────────┘       ^               │  │
//	   └──(stopped)────────────┼──> paused     │  │
//	                           └────Resume─────┘  │
//	running or paused ──(the guest ends)──> ended │      every state ──Close──> gone
//
// Goroutines: one per vCPU, locked to its thread, which alone issues that vCPU's ioctls; one per virtqueue that waits for the
// guest's notifications; one that waits for the guest's end. Close ends them all. Operations are serialised by one lock;
// Status, Wait and Done take none and never wait for the guest.
//
// The package imports no RPC and knows no agent; package main translates.
package machine
