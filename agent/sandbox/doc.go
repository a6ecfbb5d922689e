// Package sandbox is the state machine of sandboxes: what runs on this host, and why.
//
//	             create                     pause                       resume
//	(nothing) ──────────> creating ─> running ─────> pausing ─> paused ────────> resuming ─> running
//	                         │           │ ^            │          ^                │
//	                         │           │ └────────────┘          └────────────────┤  a failed pause runs on, a failed
//	                         │           │ undone                         undone    │  resume leaves the snapshot as it was
//	                         │           ├──────────────┘                           │
//	                         │           v                                          v
//	                         │        stopped  (VMM or guest ended)              failed  (its files are damaged)
//	                         │           │ resume from the last snapshot, if any    │
//	                         v           v                                          v
//	                      stopping <── every state: kill ── then stopped and removed; only its events are kept
//
// Two truths are kept apart. The VM's state is above. envd's is absent, starting, ready or unresponsive, for one incarnation:
// every start of a VM has a new number, and ready means that envd completed a handshake and answered a probe over the path of
// user requests in this incarnation. The VM is called running only from that moment on; afterwards envd may become
// unresponsive, and requests are held until it answers again.
//
// Ownership. Each Sandbox has one goroutine that owns its fields; everybody else sends it functions (do). Decisions are taken
// there and so never race; work that takes time (an operation: one start or one pause) runs in a goroutine of its own that
// asks the owner at every step, and there is at most one. A transition is written to the store, with its event, before it
// is acted on. Timers carry a number that the owner compares, so that a deadline that was moved cannot fire.
//
// Requests that find a sandbox not ready enlist as waiters; one wake serves all of them. A request that comes while the sandbox
// is pausing is served right after the pause.
//
// Kill is legal in every state and final: it cancels the operation under way, waits for it, ends the VMM and removes the files.
package sandbox
