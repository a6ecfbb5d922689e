// Package control is the host's hand in the guest: the ttrpc service by which a new incarnation is made ready, the word
// to the host that a cold boot is over, and the forwarder to the guest's TCP ports. All of it is reached over vsock, by
// the host only.
package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"

	"torpor/api/apierr"
	"torpor/api/guestpb"
	"torpor/guest/env"
)

// Bounds of the entropy of a handshake, in bytes.
const (
	minEntropy = 32
	maxEntropy = 512
)

// System is what a handshake changes beyond the daemon itself.
type System interface {
	// SetClock steps the wall clock.
	SetClock(time.Time) error
	// Reseed credits entropy to the kernel's random number generator and makes it start over from it.
	Reseed(entropy []byte) error
	// Mark leaves the marker files by which programs know the sandbox they are in.
	Mark(id *env.Identity) error
	// Renew gives a clone its own machine identity.
	Renew() error
	// Sync flushes all file systems.
	Sync()
	// PowerOff starts the shutdown and returns at once.
	PowerOff() error
}

// Service implements guestpb.GuestService.
type Service struct {
	store  *env.Store
	system System
	log    zerolog.Logger
}

// New returns the service for one guest. It must be served only when the data plane accepts connections, since a
// handshake's answer says so.
func New(store *env.Store, system System, log zerolog.Logger) *Service {
	return &Service{store: store, system: system, log: log}
}

// Serve answers the host's calls on l until ctx ends, and lets running calls finish.
func (s *Service) Serve(ctx context.Context, l net.Listener) error {
	server, err := ttrpc.NewServer()
	if err != nil {
		return fmt.Errorf("making the control server: %w", err)
	}
	guestpb.RegisterGuestService(server, s)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-done:
		case <-ctx.Done():
			grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if server.Shutdown(grace) != nil {
				_ = server.Close() // callers that do not hang up
			}
		}
	}()
	if err := server.Serve(ctx, l); err != nil && !errors.Is(err, ttrpc.ErrServerClosed) && ctx.Err() == nil {
		return fmt.Errorf("serving the host: %w", err)
	}
	return nil
}

// Handshake makes an incarnation ready. Repeating it changes nothing.
func (s *Service) Handshake(_ context.Context, req *guestpb.HandshakeRequest) (*guestpb.HandshakeResponse, error) {
	if err := validate(req); err != nil {
		return nil, apierr.ToStatus(err)
	}
	next := identity(req)
	if err := s.install(next, req); err != nil {
		s.log.Error().Err(err).Uint64("incarnation", next.Incarnation).Msg("handshake failed")
		return nil, apierr.ToStatus(err)
	}
	boot, err := BootID()
	if err != nil {
		return nil, apierr.ToStatus(err)
	}
	s.log.Info().Uint64("incarnation", next.Incarnation).Str("sandbox", next.SandboxID).Msg("ready")
	return &guestpb.HandshakeResponse{
		EnvdVersion: env.Version, BootId: boot, Incarnation: next.Incarnation, RealtimeUnixNano: time.Now().UnixNano(),
	}, nil
}

func validate(req *guestpb.HandshakeRequest) error {
	switch n := len(req.GetEntropy()); {
	case req.GetIncarnation() == 0:
		return apierr.New(apierr.BadRequest, "incarnation must be at least 1")
	case n < minEntropy || n > maxEntropy:
		return apierr.New(apierr.BadRequest, "entropy has %d bytes, must have %d to %d", n, minEntropy, maxEntropy)
	case req.GetRealtimeUnixNano() <= 0:
		return apierr.New(apierr.BadRequest, "realtime_unix_nano must be positive")
	}
	return nil
}

func identity(req *guestpb.HandshakeRequest) *env.Identity {
	id := &env.Identity{
		Incarnation: req.GetIncarnation(), SandboxID: req.GetSandboxId(), TemplateID: req.GetTemplateId(),
		AccessToken: req.GetAccessToken(), EnvVars: maps.Clone(req.GetEnvVars()),
		DefaultUser: req.GetDefaultUser(), DefaultWorkdir: req.GetDefaultWorkdir(),
	}
	if id.DefaultUser == "" {
		id.DefaultUser = DefaultUser
	}
	return id
}

// DefaultUser is who a request acts as when neither it nor the handshake says.
const DefaultUser = "user"

// clockTolerance is the error of the wall clock that is left alone: about what it takes a handshake to arrive.
const clockTolerance = 5 * time.Millisecond

// install does what must be done before any user's code runs under the new incarnation; telling the data plane is last.
func (s *Service) install(next *env.Identity, req *guestpb.HandshakeRequest) error {
	host := time.Unix(0, req.GetRealtimeUnixNano())
	if time.Until(host).Abs() > clockTolerance {
		if err := s.system.SetClock(host); err != nil {
			return err
		}
	}
	if err := s.system.Reseed(req.GetEntropy()); err != nil {
		return err
	}
	return s.store.Update(func(id *env.Identity) error {
		if id.SandboxID != next.SandboxID {
			if err := s.system.Renew(); err != nil {
				return err
			}
		}
		if err := s.system.Mark(next); err != nil {
			return err
		}
		*id = *next
		return nil
	})
}

// Sync flushes the guest's file systems.
func (s *Service) Sync(context.Context, *guestpb.SyncRequest) (*guestpb.SyncResponse, error) {
	s.system.Sync()
	return &guestpb.SyncResponse{}, nil
}

// Shutdown begins to power the guest off.
func (s *Service) Shutdown(context.Context, *guestpb.ShutdownRequest) (*guestpb.ShutdownResponse, error) {
	if err := s.system.PowerOff(); err != nil {
		return nil, apierr.ToStatus(err)
	}
	return &guestpb.ShutdownResponse{}, nil
}

// BootID returns the kernel's name of this boot.
func BootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}
