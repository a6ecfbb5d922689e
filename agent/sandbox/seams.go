package sandbox

import (
	"context"
	"net"
	"time"

	"torpor/agent/template"
	"torpor/agent/vmproc"
	"torpor/api/guestpb"
	"torpor/api/vmmpb"
)

// VM is one VMM process. *vmproc.Process is one.
type VM interface {
	vmmpb.VMMService
	// Identity is what the process is found by after a restart of the agent.
	Identity() vmproc.Identity
	// Done is closed when the process has ended; Ended then says how.
	Done() <-chan struct{}
	Ended() string
	// Stop asks it to end and kills it after grace; Kill ends it at once. Both return when it is gone.
	Stop(ctx context.Context, grace time.Duration) error
	Kill(ctx context.Context) error
	// Detach lets go of it without ending it.
	Detach()
}

// VMMs starts and finds VMM processes by the name of their sandbox.
type VMMs interface {
	Start(ctx context.Context, name, logPath string) (VM, error)
	// Adopt takes over a process of an earlier agent; vmproc.ErrGone says that it does not live.
	Adopt(ctx context.Context, name string, id vmproc.Identity) (VM, error)
	// Scan lists every VMM that lives and was started for this agent's run directory; End kills one of them.
	Scan() ([]vmproc.Found, error)
	End(ctx context.Context, id vmproc.Identity) error
	VsockSocket(name string) string
	// Clear removes the sockets of a machine that has ended.
	Clear(name string) error
}

// Guest is envd inside one VM. *guest.Guest is one.
type Guest interface {
	// Handshake retries until ctx ends while the guest does not take connections.
	Handshake(ctx context.Context, req *guestpb.HandshakeRequest) (Contact, error)
	Probe(ctx context.Context, incarnation uint64) (time.Duration, error)
	// Dial wraps guest.ErrClosed when the guest refused.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
	// ListenHello must be called before the guest boots.
	ListenHello() (Hello, error)
}

// Hello is the first sign of life of a guest that boots.
type Hello interface {
	// Wait returns the guest's boot id.
	Wait(ctx context.Context) (string, error)
	Close()
}

// Memory is that of the host. *pressure.Host is one.
type Memory interface {
	// Available returns the bytes that can be used without swapping.
	Available() (uint64, error)
	// Watch calls short whenever the host runs short of memory, until ctx ends.
	Watch(ctx context.Context, short func())
}

// Contact is the open control connection to envd.
type Contact interface {
	EnvdVersion() string
	Lost() <-chan struct{}
	Close()
}

// Templates are what sandboxes start from.
type Templates interface {
	// Get returns a template by its id, waiting for its build; not_found for an id there is none of.
	Get(ctx context.Context, id string) (*template.Template, error)
	// ByDigest returns the very template a sandbox was made from.
	ByDigest(ctx context.Context, digest string) (*template.Template, error)
}

// Layers makes the copy-on-write layers of disks. agent/disk does.
type Layers interface {
	Create(path string, virtualSize uint64) error
	// Merge writes one new layer, durable, with the contents of several, oldest first.
	Merge(ctx context.Context, dst string, layers []string) error
	// Check refuses a layer that is not what it was when it was sealed. It reads one whole only if something has written to it since.
	Check(path string) error
	// Seal adds checksums to a layer that nobody writes any more. One that cannot be sealed now is no error.
	Seal(ctx context.Context, path string) error
	// Free returns the bytes free for the agent on path's file system.
	Free(path string) (uint64, error)
}
