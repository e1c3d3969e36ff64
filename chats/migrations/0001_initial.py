import config.kernel.ids
import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Chat',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='chat', serialize=False)),
                ('title', models.CharField(max_length=200, null=True)),
                ('client_id', models.CharField(max_length=128, null=True)),
                ('active_run_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('has_line', models.BooleanField(default=False)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('deleted_at', models.DateTimeField(null=True)),
                ('user', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='chats', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(models.F('user'), models.F('created_at'), models.F('id'), condition=models.Q(('deleted_at', None)), name='chat_live_by_user'), models.Index(models.F('deleted_at'), models.F('id'), condition=models.Q(('deleted_at__isnull', False)), name='chat_to_purge'), models.Index(models.F('user'), models.F('id'), name='chat_by_user')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('client_id__isnull', False), ('deleted_at', None)), fields=('user', 'client_id'), name='chat_one_live_per_client_id')],
            },
        ),
        migrations.CreateModel(
            name='Message',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='msg', serialize=False)),
                ('run_id', config.kernel.ids.RefField(db_index=True, max_length=32)),
                ('role', models.CharField(choices=[('user', 'User'), ('assistant', 'Assistant')], max_length=10)),
                ('content', models.TextField(default='')),
                ('replaced', models.BooleanField(default=False)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('chat', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='messages', to='chats.chat')),
            ],
            options={
                'ordering': ['created_at', 'id'],
                'indexes': [models.Index(models.F('chat'), models.F('created_at'), models.F('id'), models.F('replaced'), name='message_by_chat')],
            },
        ),
        migrations.CreateModel(
            name='Attachment',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='att', serialize=False)),
                ('position', models.PositiveSmallIntegerField(default=0)),
                ('file_name', models.CharField(max_length=255)),
                ('content_type', models.CharField(max_length=127)),
                ('size_bytes', models.BigIntegerField()),
                ('sha256', models.CharField(max_length=64, null=True)),
                ('status', models.CharField(choices=[('PENDING', 'Pending'), ('READY', 'Ready'), ('EXPIRED', 'Expired')], default='PENDING', max_length=8)),
                ('stored_name', models.CharField(default='', max_length=100)),
                ('copy_of', config.kernel.ids.RefField(max_length=32, null=True)),
                ('expires_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='attachments', to=settings.AUTH_USER_MODEL)),
                ('message', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='attachments', to='chats.message')),
            ],
            options={
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(models.F('message'), models.F('position'), condition=models.Q(('message__isnull', False)), name='attachment_by_message'), models.Index(models.F('expires_at'), condition=models.Q(('expires_at__isnull', False)), name='attachment_due'), models.Index(models.F('created_at'), condition=models.Q(('message__isnull', True)), name='attachment_unused')],
                'constraints': [models.CheckConstraint(condition=models.Q(('message', None), ('status', 'READY'), _connector='OR'), name='attachment_used_is_ready')],
            },
        ),
    ]
