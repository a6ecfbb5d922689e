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
type Sender struct{ conn *net.UnixConn }

// Dial connects to the socket of an Inbox.
func Dial(ctx context.Context, path string) (*Sender, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("hand over files: %w", err)
	}
	return &Sender{conn.(*net.UnixConn)}, nil
}

// Close ends the connection. The other side closes the files of it that nobody has claimed.
func (s *Sender) Close() error { return s.conn.Close() }

// Send hands over a copy of f's descriptor and returns when it is held under the name. f stays the caller's. ErrName, ErrTaken,
// ErrFull and ErrCount (wrapped) are what the other side may answer.
func (s *Sender) Send(ctx context.Context, name string, f *os.File) error {
	answer, err := s.exchange(ctx, name, f)
	if err == nil {
		err = parseAnswer(answer)
	}
	if err != nil {
		return fmt.Errorf("hand over file %.80q: %w", name, err)
	}
	return nil
}

func (s *Sender) exchange(ctx context.Context, name string, f *os.File) (answer string, err error) {
	if !validName(name) {
		return "", ErrName // nor could an empty message be told from the end
	}
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			err = errors.Join(context.Cause(ctx), err)
		}
	}()
	raw, err := f.SyscallConn()
	if err != nil {
		return "", err
	}
	var sent error
	err = raw.Control(func(fd uintptr) { _, _, sent = s.conn.WriteMsgUnix([]byte(name), unix.UnixRights(int(fd)), nil) })
	if err = errors.Join(err, sent); err != nil {
		return "", err
	}
	var b [answerBytes]byte
	n, err := s.conn.Read(b[:])
	return string(b[:n]), err
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
