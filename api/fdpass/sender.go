package fdpass

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Sender hands files over. One call at a time.
type Sender struct {
	conn   *net.UnixConn
	posted []string // names whose answers have not been read
}

// Dial connects to the socket of an Inbox.
func Dial(ctx context.Context, path string) (*Sender, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("hand over files: %w", err)
	}
	return &Sender{conn: conn.(*net.UnixConn)}, nil
}

// Close ends the connection. The other side closes the files of it that nobody has claimed.
func (s *Sender) Close() error { return s.conn.Close() }

// Send hands over a copy of f's descriptor and returns when it is held under the name. f stays the caller's. ErrName, ErrTaken,
// ErrFull and ErrCount (wrapped) are what the other side may answer.
func (s *Sender) Send(ctx context.Context, name string, f *os.File) error {
	return errors.Join(s.Post(ctx, name, f), s.Wait(ctx))
}

// Post is Send without waiting: many files are on their way at once, and Wait returns when all are held.
func (s *Sender) Post(ctx context.Context, name string, f *os.File) error {
	if !validName(name) { // nor could an empty message be told from the end
		return told(name, ErrName)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return told(name, err)
	}
	err = s.within(ctx, func() (err error) {
		var sent error
		err = raw.Control(func(fd uintptr) { _, _, sent = s.conn.WriteMsgUnix([]byte(name), unix.UnixRights(int(fd)), nil) })
		return errors.Join(err, sent)
	})
	if err != nil {
		return told(name, err)
	}
	s.posted = append(s.posted, name)
	return nil
}

// Wait returns when every file that was posted is held, or with what is wrong with one.
func (s *Sender) Wait(ctx context.Context) error {
	for len(s.posted) > 0 {
		name := s.posted[0]
		s.posted = s.posted[1:]
		err := s.within(ctx, func() error {
			var b [answerBytes]byte
			n, err := s.conn.Read(b[:])
			if err != nil {
				return err
			}
			return parseAnswer(string(b[:n]))
		})
		if err != nil {
			return told(name, err)
		}
	}
	return nil
}

func told(name string, err error) error { return fmt.Errorf("hand over file %.80q: %w", name, err) }

// within runs f, whose use of the connection ends with ctx.
func (s *Sender) within(ctx context.Context, f func() error) (err error) {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			err = errors.Join(context.Cause(ctx), err)
		}
	}()
	return f()
}

func parseAnswer(word string) error {
	if word == accepted {
		return nil
	}
	for err, w := range refusals {
		if w == word {
			return err
		}
	}
	return fmt.Errorf("unknown answer %q", word)
}
