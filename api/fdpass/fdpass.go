// Package fdpass hands open files to a process that may open none itself, over a unix socket of type SOCK_SEQPACKET.
//
// A message is the file's name (1 to 64 bytes from '!' to '~') and exactly one descriptor by SCM_RIGHTS (unix(7)); the answer
// is one message, "ok" or a word for what was wrong with it. The receiver holds the file under its name until somebody claims
// it. What nobody has claimed when the connection that brought it ends is closed.
//
// A Sender is the client's end, an Inbox the receiver's.
package fdpass

import "errors"

// MaxName is the longest name of a file, in bytes.
const MaxName = 64

// MaxHeld is how many files an Inbox holds at most.
const MaxHeld = 64

// Why a file is refused.
var (
	ErrName  = errors.New("a file's name is 1 to 64 printable bytes")
	ErrTaken = errors.New("a file of this name is held already")
	ErrFull  = errors.New("64 files are held already")
	ErrCount = errors.New("a message carries exactly one file")
)

const accepted = "ok"

// refusals are the words of the answers.
var refusals = map[error]string{ErrName: "name", ErrTaken: "taken", ErrFull: "full", ErrCount: "count"}

// answerBytes is room for an answer and one byte more, by which one that is too long is seen.
const answerBytes = 16

func validName(name string) bool {
	for _, b := range []byte(name) {
		if b <= ' ' || b > '~' {
			return false
		}
	}
	return len(name) >= 1 && len(name) <= MaxName
}
